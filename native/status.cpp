#include "status.h"

#include "llama.h"

#include <cstdio>
#include <new>
#include <system_error>

namespace spark {

static std::string vformat(const char * fmt, va_list args) {
    va_list copy;
    va_copy(copy, args);
    const int size = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);
    std::string text(size > 0 ? size : 0, '\0');
    if (size > 0) {
        vsnprintf(&text[0], text.size() + 1, fmt, args);
    }
    return text;
}

std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    return text;
}

// A fixed buffer, so that an out-of-memory text needs no memory.
static thread_local char last_error_text[2048];

void set_last_error(const std::string & text) {
    snprintf(last_error_text, sizeof(last_error_text), "%s", text.c_str());
}

const char * last_error() {
    return last_error_text;
}

spark_status store_current_exception() {
    try {
        throw;
    } catch (const error & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        snprintf(last_error_text, sizeof(last_error_text), "out of memory");
        return SPARK_STATUS_OUT_OF_MEMORY;
    } catch (const std::system_error & e) {
        snprintf(last_error_text, sizeof(last_error_text), "the operating system refused: %s", e.what());
        return SPARK_STATUS_IO;
    } catch (const std::exception & e) {
        snprintf(last_error_text, sizeof(last_error_text), "internal error: %s", e.what());
        return SPARK_STATUS_INTERNAL;
    } catch (...) {
        snprintf(last_error_text, sizeof(last_error_text), "internal error: unknown exception");
        return SPARK_STATUS_INTERNAL;
    }
}

void log(log_level level, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string text = vformat(fmt, args);
    va_end(args);
    const ggml_log_level ggml_level = level == log_level::error ? GGML_LOG_LEVEL_ERROR :
                                      level == log_level::warn  ? GGML_LOG_LEVEL_WARN  : GGML_LOG_LEVEL_INFO;
    ggml_log_callback callback = nullptr;
    void * user_data = nullptr;
    llama_log_get(&callback, &user_data);
    callback(ggml_level, ("spark: " + text + "\n").c_str(), user_data);
}

} // namespace spark
