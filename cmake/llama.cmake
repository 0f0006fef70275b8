# llama.cpp as a subproject: our options, and only the targets that something of ours needs.
set(BUILD_SHARED_LIBS ON)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TOOLS ON CACHE BOOL "" FORCE)
set(LLAMA_BUILD_SERVER ON CACHE BOOL "" FORCE)
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
set(LLAMA_BUILD_APP OFF CACHE BOOL "" FORCE)
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "" FORCE) # nothing is downloaded behind the user's back
set(LLAMA_BUILD_UI OFF CACHE BOOL "" FORCE)        # webui.cmake builds it, once for all checkouts
set(GGML_RPC ON CACHE BOOL "" FORCE)
set(GGML_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(GGML_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
if(SPARK_PORTABLE)
    set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
    set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
    set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "" FORCE)
    set(SPARK_PORTABLE_JSON true)
else()
    set(GGML_NATIVE ON CACHE BOOL "" FORCE)
    set(GGML_BACKEND_DL OFF CACHE BOOL "" FORCE)
    set(GGML_CPU_ALL_VARIANTS OFF CACHE BOOL "" FORCE)
    set(SPARK_PORTABLE_JSON false)
endif()

# llama.cpp asks git for its version. The sources lie inside our checkout, whose commits say nothing about them and would
# rebuild them at each commit.
set(ENV{GIT_CEILING_DIRECTORIES} "${CMAKE_BINARY_DIR}")
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "${SPARK_UPSTREAM_COMMIT}")
unset(GGML_AVAILABLE_BACKENDS CACHE) # llama.cpp only ever adds to this list

add_subdirectory("${SPARK_UPSTREAM_DIR}" "${CMAKE_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)
# Without this (CMake 4) unity files hold absolute paths, which no other clone finds in ccache.
set_target_properties(llama PROPERTIES UNITY_BUILD_RELOCATABLE ON)
# GCC 12 warns some eight hundred times about its own AVX-512 headers there, which hides what concerns the user.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    foreach(library ggml-cpu ${GGML_AVAILABLE_BACKENDS})
        if(library MATCHES "^ggml-cpu" AND TARGET ${library})
            target_compile_options(${library} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
        endif()
    endforeach()
endif()
if(NOT OPENSSL_INCLUDE_DIR)
    message(STATUS "OpenSSL not found: no HTTPS, so -hf and --model-url cannot fetch (on Debian or Ubuntu: apt install libssl-dev)")
    set(SPARK_HTTPS_JSON false)
else()
    set(SPARK_HTTPS_JSON true)
endif()
if(NOT SPARK_STOCK)
    # The patched files include the headers of our hooks.
    foreach(library llama ggml-cuda server-context llama-server-impl)
        if(TARGET ${library})
            target_include_directories(${library} PRIVATE "${CMAKE_SOURCE_DIR}/native")
        endif()
    endforeach()
endif()
include(webui)
