// Failures inside the library are exceptions with a status; guard() turns them into a status and a text at the C edge.
#pragma once

#include "spark_moe.h"

#include <cstdarg>
#include <stdexcept>
#include <string>

namespace spark {

// printf into a string
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string format(const char * fmt, ...);

// A failure with the status the C API returns for it; what() is a sentence for the person who can act.
class error : public std::runtime_error {
public:
    error(spark_status status, const std::string & text) : std::runtime_error(text), status(status) {}

    const spark_status status;
};

// Text behind spark_last_error, per thread.
void         set_last_error(const std::string & text);
const char * last_error();

// Status of the exception in flight, with its text stored; call inside a catch block only.
spark_status store_current_exception();

// Runs fn; the only place where exceptions become statuses.
template <typename F>
int32_t guard(F && fn) {
    try {
        fn();
        return SPARK_STATUS_OK;
    } catch (...) {
        return store_current_exception();
    }
}

// A line in llama.cpp's log (stderr by default), prefixed "spark: ".
enum class log_level { info, warn, error };

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void log(log_level level, const char * fmt, ...);

} // namespace spark
