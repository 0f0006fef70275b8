# llama-server's web UI: built from the vendored sources with npm next to the compilation, kept in the user's cache, and
# embedded by llama.cpp's own rules. Without npm, without network or after a failure the server is built without it.
set(dist "${SPARK_UPSTREAM_DIR}/tools/ui/dist")
find_program(SPARK_NPM npm)
if(SPARK_UI STREQUAL "ON" AND NOT SPARK_NPM)
    message(FATAL_ERROR "SPARK_UI=ON, but npm was not found; install Node.js 20 or later with npm, or use SPARK_UI=AUTO")
endif()
if(NOT SPARK_UI OR SPARK_SANITIZE OR SPARK_STOCK)
    file(REMOVE_RECURSE "${dist}")
elseif(NOT SPARK_NPM)
    file(REMOVE_RECURSE "${dist}")
    file(WRITE "${dist}/index.html" "<!doctype html><meta charset=utf-8><title>dflash_server</title>"
        "<p>The server works; its web UI was left out, because npm was not there when it was built.\n")
    message(STATUS "Web UI left out: npm was not found")
else()
    message(STATUS "Web UI: npm builds it, which takes some minutes the first time")
    set(strict)
    if(SPARK_UI STREQUAL "ON")
        set(strict --strict)
    endif()
    add_custom_target(spark_webui
        COMMAND "${Python3_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/scripts/webui.py" --source "${SPARK_UPSTREAM_DIR}/tools/ui"
            --npm "${SPARK_NPM}" --into "${dist}" --version "${SPARK_UPSTREAM_COMMIT}" ${strict}
        COMMENT "Web UI (npm)" VERBATIM)
    add_dependencies(llama-ui-assets spark_webui)
endif()
