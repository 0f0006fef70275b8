# Sanitizers for ggml, our code and the native tests: a race between our threads and ggml's is only seen when both are
# instrumented. libllama stays as it is, since the tests need three small functions of it and nothing of it touches our
# memory; so it comes from ccache. OpenMP is off, because ThreadSanitizer does not understand libgomp's barriers.
if(SPARK_SANITIZE STREQUAL "address")
    # undefined behaviour stops our own code; ggml's (null pointers with length 0) is upstream's affair
    set(SPARK_SANITIZE_FLAGS -fsanitize=address -fno-omit-frame-pointer)
    set(SPARK_SANITIZE_OURS -fsanitize=undefined -fno-sanitize-recover=undefined)
elseif(SPARK_SANITIZE STREQUAL "thread")
    set(SPARK_SANITIZE_FLAGS -fsanitize=thread)
elseif(SPARK_SANITIZE)
    message(FATAL_ERROR "SPARK_SANITIZE is '${SPARK_SANITIZE}'; it can be address, thread, or empty")
endif()
if(SPARK_SANITIZE)
    set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
    set(SPARK_BUILD_TESTS ON)
endif()

# Instruments ggml's targets and whatever this folder adds afterwards. A macro: directory options belong to the caller.
macro(spark_sanitize)
    if(SPARK_SANITIZE)
        foreach(target ggml-base ggml ggml-cpu ggml-rpc)
            if(TARGET ${target})
                target_compile_options(${target} PRIVATE ${SPARK_SANITIZE_FLAGS} -g1 -O1)
                target_link_options(${target} PRIVATE ${SPARK_SANITIZE_FLAGS})
            endif()
        endforeach()
        add_compile_options(${SPARK_SANITIZE_FLAGS} ${SPARK_SANITIZE_OURS} -g1 -O1)
        add_link_options(${SPARK_SANITIZE_FLAGS} ${SPARK_SANITIZE_OURS})
    endif()
endmacro()
