/* spark_moe.h is C99: it compiles with warnings as errors, and a C program calls through it. */
#include "spark_moe.h"

#include <stdio.h>
#include <string.h>

int main(void) {
    const size_t sizes[] = {
        sizeof(struct spark_store_params), sizeof(struct spark_layer_info), sizeof(struct spark_layer_plan), sizeof(struct spark_plan),
        sizeof(struct spark_stats), sizeof(struct spark_server_model), sizeof(struct spark_server_callbacks),
        sizeof(struct spark_device_info), sizeof(struct spark_draft_params),
        sizeof(struct spark_speculation_params), sizeof(struct spark_sampling), sizeof(struct spark_speculation_step), sizeof(struct spark_speculation_stats),
    };
    struct spark_store_params params;
    struct spark_store * store = NULL;
    int32_t i, failures = 0;

    failures += spark_api_version() != SPARK_API_VERSION;
    for (i = 0; i < (int32_t) (sizeof(sizes) / sizeof(sizes[0])); i++) {
        if (spark_sizeof(i) != sizes[i]) {
            fprintf(stderr, "structure %d: %zu bytes in the library, %zu here\n", (int) i, spark_sizeof(i), sizes[i]);
            failures++;
        }
    }
    failures += spark_sizeof(-1) != 0 || spark_sizeof(i) != 0;

    memset(&params, 0, sizeof(params));
    params.model_path = "no-such-model.gguf";
    failures += spark_store_init(&params, &store) != SPARK_STATUS_NOT_FOUND;
    failures += store != NULL || strstr(spark_last_error(), "no-such-model.gguf") == NULL;
    spark_store_free(NULL);
    return failures;
}
