# Compiles through ccache when it is there. Paths are made relative to this checkout, so that another clone, in another
# folder, finds the same objects; the CPU's features are part of the key, because -march=native names no CPU and a cache
# may be shared between machines.
find_program(SPARK_CCACHE ccache DOC "ccache; set to the empty string to compile without it")
set(GGML_CCACHE OFF CACHE BOOL "" FORCE)
if(SPARK_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(cpu "unknown")
    if(EXISTS /proc/cpuinfo)
        file(STRINGS /proc/cpuinfo cpu REGEX "^(model name|flags|Features)" LIMIT_COUNT 2)
    endif()
    file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/cpu.txt" CONTENT "${cpu}\n" @ONLY)
    set(launcher "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
        "CCACHE_EXTRAFILES=${CMAKE_BINARY_DIR}/cpu.txt" "CCACHE_SLOPPINESS=time_macros" "${SPARK_CCACHE}")
    foreach(language C CXX CUDA)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
    endforeach()
endif()
