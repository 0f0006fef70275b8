# Stages the pinned llama.cpp with the series into this build folder (scripts/upstream.py does the work and the checks).
# The folder is part of the build folder, so two checkouts never share one, and its path relative to the checkout is the
# same everywhere, which is what ccache keys on.
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
set(SPARK_UPSTREAM_DIR "${CMAKE_BINARY_DIR}/upstream")
set(tool "${CMAKE_SOURCE_DIR}/scripts/upstream.py")
file(GLOB patches CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patches} "${CMAKE_SOURCE_DIR}/patches/UPSTREAM"
    "${tool}" "${CMAKE_SOURCE_DIR}/scripts/upstream_source.py" "${CMAKE_SOURCE_DIR}/scripts/patch_series.py")

set(arguments)
if(SPARK_UPSTREAM_SDIST)
    list(APPEND arguments --sdist "${SPARK_UPSTREAM_SDIST}")
endif()
if(SPARK_UPSTREAM_SOURCE)
    list(APPEND arguments --source "${SPARK_UPSTREAM_SOURCE}")
endif()
list(APPEND arguments stage --into "${SPARK_UPSTREAM_DIR}")
if(SPARK_STOCK)
    list(APPEND arguments --unpatched)
endif()
execute_process(COMMAND "${Python3_EXECUTABLE}" "${tool}" ${arguments} RESULT_VARIABLE result OUTPUT_VARIABLE text
    OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "The upstream sources could not be prepared; the reason is above.")
endif()
message(STATUS "${text}")

file(STRINGS "${CMAKE_SOURCE_DIR}/patches/UPSTREAM" pin REGEX "^(version|commit) *=")
foreach(line IN LISTS pin)
    string(REGEX MATCH "^([a-z]+) *= *(.*)$" line "${line}")
    string(TOUPPER "${CMAKE_MATCH_1}" key)
    set(SPARK_UPSTREAM_${key} "${CMAKE_MATCH_2}")
endforeach()
file(STRINGS "${SPARK_UPSTREAM_DIR}/.spark-stamp" SPARK_UPSTREAM_STAMP)
