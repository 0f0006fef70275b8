// The smallest test frame that says what failed: CHECK counts and prints, RUN names the case, main returns the count.
#pragma once

#include "status.h"

#include <atomic>
#include <cstdio>
#include <exception>
#include <string>

namespace test {

inline std::atomic<int> & failures() { // checks run in threads too
    static std::atomic<int> n { 0 };
    return n;
}

inline void fail(const char * file, int line, const std::string & what) {
    failures()++;
    fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename F>
void run(const char * name, F && body) {
    const int before = failures();
    try {
        body();
    } catch (const std::exception & e) {
        fail(name, 0, std::string("unexpected exception: ") + e.what());
    }
    printf("%-6s %s\n", failures() == before ? "ok" : "FAILED", name);
    fflush(stdout);
}

} // namespace test

#define CHECK(condition) \
    do { if (!(condition)) { test::fail(__FILE__, __LINE__, "false: " #condition); } } while (0)

#define CHECK_EQ(a, b) \
    do { \
        const auto check_a = (a); const auto check_b = (b); \
        if (!(check_a == check_b)) { \
            test::fail(__FILE__, __LINE__, std::string(#a " == " #b ", but ") + std::to_string(check_a) + " and " + std::to_string(check_b)); \
        } \
    } while (0)

// The statement throws spark::error with this status, and its text contains `part`.
#define CHECK_THROWS(statement, expected, part) \
    do { \
        bool thrown = false; \
        try { \
            statement; \
        } catch (const spark::error & e) { \
            thrown = true; \
            CHECK_EQ((int) e.status, (int) (expected)); \
            if (std::string(e.what()).find(part) == std::string::npos) { \
                test::fail(__FILE__, __LINE__, std::string("no \"") + (part) + "\" in: " + e.what()); \
            } \
        } \
        if (!thrown) { test::fail(__FILE__, __LINE__, "nothing thrown by: " #statement); } \
    } while (0)

#define RUN(name) test::run(#name, name)
