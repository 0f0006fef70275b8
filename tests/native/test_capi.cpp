// The C API: statuses, texts, what is left after a failure, and files that are not what they claim to be.
#include "check.h"
#include "store_fixture.h"
#include "spark_moe.h"

#include "llama.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

static test::temporary_folder folder;
static const test::model M(folder, "capi.gguf", 2, 4);

static spark_store_params params_for(const char * path) { return { path, 2, true, false }; }

// Status of opening `path`; on success the store is freed, on failure `out` was not written and there is a text.
static int32_t open_status(const std::string & path) {
    const spark_store_params params = params_for(path.c_str());
    spark_store * const untouched = reinterpret_cast<spark_store *>(&folder);
    spark_store * store = untouched;
    const int32_t status = spark_store_init(&params, &store);
    if (status == SPARK_STATUS_OK) {
        spark_store_free(store);
    } else {
        CHECK(store == untouched);
        CHECK(spark_last_error()[0] != '\0');
    }
    return status;
}

static bool last_error_has(const char * part) { return strstr(spark_last_error(), part) != nullptr; }

static void life_cycle() {
    const spark_store_params params = params_for(M.path.c_str());
    spark_store * store = nullptr;
    CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_OK);
    CHECK_EQ(spark_store_n_layers(store), 2);
    spark_layer_info info;
    CHECK_EQ(spark_store_get_layer_info(store, 1, &info), SPARK_STATUS_OK);
    CHECK_EQ(info.layer, 1);
    CHECK_EQ(info.n_expert, 4);
    CHECK_EQ(info.n_tensors, 3);
    CHECK_EQ(info.expert_bytes, (uint64_t) (160 * 96 * 2 + 2 * 96 * 160 / 32 * 34));
    CHECK(!spark_store_is_loaded(store));
    CHECK(spark_store_get_overrides(store) != nullptr);
    int32_t slots[4];
    CHECK_EQ(spark_store_get_residency(store, 0, slots, 4), SPARK_STATUS_BAD_STATE);
    uint64_t counts[4] = { 1, 1, 1, 1 };
    CHECK_EQ(spark_store_get_counts(store, 0, counts, 4), SPARK_STATUS_OK);
    CHECK_EQ(counts[3], (uint64_t) 0);
    spark_stats stats;
    CHECK_EQ(spark_store_get_stats(store, &stats), SPARK_STATUS_OK);
    CHECK_EQ(stats.layer, -1);
    CHECK_EQ(stats.n_expert, 8);
    CHECK_EQ(spark_store_wait_idle(store, 0), SPARK_STATUS_OK);
    CHECK_EQ(spark_store_reset_stats(store), SPARK_STATUS_OK);
    spark_store_free(store);
    spark_store_free(nullptr);
}

static void bad_arguments() {
    spark_store * store = nullptr;
    spark_store_params params = params_for(M.path.c_str());
    CHECK_EQ(spark_store_init(nullptr, &store), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_store_init(&params, nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    for (int32_t n : { -1, 65, INT32_MAX, INT32_MIN }) {
        params.n_io_threads = n;
        CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK(last_error_has(std::to_string(n).c_str()));
    }
    params = params_for("");
    CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_INVALID_ARGUMENT);
    params = params_for(nullptr);
    CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK(store == nullptr);

    params = params_for(M.path.c_str());
    CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_OK);
    spark_layer_info info;
    spark_stats stats;
    int32_t slots[4];
    uint64_t counts[4];
    for (int32_t index : { -1, 2, INT32_MAX }) {
        CHECK_EQ(spark_store_get_layer_info(store, index, &info), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_store_get_layer_stats(store, index, &stats), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_store_get_residency(store, index, slots, 4), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_store_get_counts(store, index, counts, 4), SPARK_STATUS_INVALID_ARGUMENT);
    }
    CHECK_EQ(spark_store_get_residency(store, 0, slots, 3), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK(last_error_has("3 experts"));
    CHECK_EQ(spark_store_get_counts(store, 0, nullptr, 4), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_store_get_stats(store, nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_store_get_stats(nullptr, &stats), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_store_set_plan(store, nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_store_n_layers(nullptr), 0);
    CHECK(!spark_store_is_loaded(nullptr));
    CHECK(spark_store_get_overrides(nullptr) == nullptr);
    spark_store_free(store);
}

static void errors_belong_to_their_thread() {
    const spark_store_params params = params_for("missing.gguf");
    spark_store * store = nullptr;
    CHECK_EQ(spark_store_init(&params, &store), SPARK_STATUS_NOT_FOUND);
    CHECK(last_error_has("missing.gguf"));
    std::thread other([] { CHECK_EQ(strlen(spark_last_error()), (size_t) 0); });
    other.join();
    CHECK(last_error_has("missing.gguf"));
}

static void paths() {
    CHECK_EQ(open_status(folder.file("nothing.gguf")), SPARK_STATUS_NOT_FOUND);
    CHECK_EQ(open_status(folder.path), SPARK_STATUS_NOT_FOUND);
    CHECK_EQ(open_status("/dev/null"), SPARK_STATUS_NOT_FOUND);
    const std::string strange = folder.file("mod\xc3\xa8le \xe6\x97\xa5\xe6\x9c\xac 'x' %s.gguf"); // spaces, quotes, non-ASCII, a format
    test::write_gguf(strange, M.tensors);
    CHECK_EQ(open_status(strange), SPARK_STATUS_OK);
    if (geteuid() != 0) { // root may read anything
        chmod(strange.c_str(), 0);
        CHECK_EQ(open_status(strange), SPARK_STATUS_NOT_FOUND);
    }
}

struct bad_file {
    const char * name;
    int32_t status;
    std::function<void(std::vector<char> &)> damage;
};

static void put(std::vector<char> & bytes, size_t at, uint64_t value, size_t size) { memcpy(bytes.data() + at, &value, size); }

// magic 4, version 4, n_tensors 8, n_kv 8, first key: length 8
static const bad_file BAD_FILES[] = {
    { "control",        SPARK_STATUS_OK,         [](std::vector<char> &) {} },
    { "empty",          SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { b.clear(); } },
    { "magic",          SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { b[0] = 'X'; } },
    { "version 0",      SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 4, 0, 4); } },
    { "version 99",     SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 4, 99, 4); } },
    { "big endian",     SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 4, 0x03000000, 4); } },
    { "tensors 2^63",   SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 8, UINT64_MAX / 2, 8); } },
    { "tensors + 1",    SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 8, 9, 8); } },
    { "keys 2^63",      SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 16, UINT64_MAX / 2, 8); } },
    { "key 2^60 long",  SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { put(b, 24, (uint64_t) 1 << 60, 8); } },
    { "one byte short", SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { b.resize(b.size() - 40); } },
    { "half",           SPARK_STATUS_BAD_FORMAT, [](std::vector<char> & b) { b.resize(b.size() / 2); } },
};

static void bad_files() {
    const std::vector<char> good = test::read_file(M.path);
    const std::string path = folder.file("bad.gguf");
    for (const bad_file & bad : BAD_FILES) {
        std::vector<char> bytes = good;
        bad.damage(bytes);
        test::write_file(path, bytes);
        const int32_t status = open_status(path);
        if (status != bad.status) { test::fail(bad.name, 0, "status " + std::to_string(status) + ": " + spark_last_error()); }
    }
}

static void bad_tensors() {
    const std::string path = folder.file("tensors.gguf");
    const auto with = [&](const char * name, std::vector<int64_t> ne, ggml_type type = GGML_TYPE_Q8_0) {
        auto tensors = M.tensors;
        for (auto & t : tensors) {
            if (t.name == name) { t = { name, type, ne }; }
        }
        test::write_gguf(path, tensors);
        return open_status(path);
    };
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 96, 160, 3 }), SPARK_STATUS_BAD_FORMAT); // 3 experts, the others 4
    CHECK(last_error_has("3 experts"));
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 96, 160, 4, 2 }), SPARK_STATUS_BAD_FORMAT);
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 0, 160, 4 }), SPARK_STATUS_BAD_FORMAT); // experts of no bytes
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 96, 0, 4 }), SPARK_STATUS_BAD_FORMAT);
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 96, 160, 0 }), SPARK_STATUS_BAD_FORMAT);
    CHECK_EQ(with("blk.1.ffn_up_exps.weight", { 96, 160, 4 }, GGML_TYPE_F32), SPARK_STATUS_OK); // types may differ
    auto tensors = test::moe_tensors(1, 4);
    tensors.resize(1);
    test::write_gguf(path, tensors);
    CHECK_EQ(open_status(path), SPARK_STATUS_NO_EXPERTS);
    CHECK(last_error_has("dense"));
    for (const char * name : { "blk.-1.ffn_up_exps.weight", "blk.x.ffn_up_exps.weight", "blk.0.ffn_up_exps.bias", "blk.0.ffn_side_exps.weight",
                               "blk.0.ffn_up_exps.weight2", "v.blk.0.ffn_up_exps.weight" }) {
        test::write_gguf(path, { { name, GGML_TYPE_Q8_0, { 96, 160, 4 } } });
        CHECK_EQ(open_status(path), SPARK_STATUS_NO_EXPERTS); // names that are not expert weights
    }
}

// Where the data begins: the first tensor is a norm of 96 floats, padded, and the next an expert tensor.
static size_t header_size() {
    size_t first = SIZE_MAX;
    for (const auto & layer : spark::model_file(M.path, false).layers) {
        for (const auto & tensor : layer.tensors) { first = std::min(first, tensor.offset); }
    }
    return first - 96 * sizeof(float);
}

// The header cut at every byte is refused; nothing crashes.
static void every_prefix_of_the_header() {
    const std::vector<char> good = test::read_file(M.path);
    const size_t header = header_size();
    const std::string path = folder.file("prefix.gguf");
    for (size_t n = 0; n < header; n++) {
        test::write_file(path, std::vector<char>(good.begin(), good.begin() + n));
        CHECK_EQ(open_status(path), SPARK_STATUS_BAD_FORMAT);
    }
}

// Random damage: whatever the verdict, it is a status, and a store that opens can allocate and read.
static void random_damage() {
    const std::vector<char> good = test::read_file(M.path);
    const size_t header = header_size();
    const std::string path = folder.file("random.gguf");
    std::mt19937 random(1);
    int opened = 0;
    for (int i = 0; i < 1500; i++) {
        std::vector<char> bytes = good;
        for (int n = 1 + random() % 3; n > 0; n--) {
            const size_t at = random() % header;
            switch (random() % 3) {
                case 0:  bytes[at] = (char) random(); break;
                case 1:  bytes[at] ^= (char) (1 << random() % 8); break;
                default: if (at + 8 <= header) { put(bytes, at, random() % 2 ? UINT64_MAX - random() % 64 : random() % 64, 8); }
            }
        }
        test::write_file(path, bytes);
        const spark_store_params params = params_for(path.c_str());
        spark_store * store = nullptr;
        const int32_t status = spark_store_init(&params, &store);
        CHECK(status == SPARK_STATUS_OK || status == SPARK_STATUS_BAD_FORMAT || status == SPARK_STATUS_NO_EXPERTS || status == SPARK_STATUS_NOT_FOUND ||
              status == SPARK_STATUS_OUT_OF_MEMORY);
        if (status != SPARK_STATUS_OK) { continue; }
        opened++;
        spark_store_free(store);
        spark::store_options options;
        options.path = path;
        options.n_io_threads = 1;
        options.lock_fast = false;
        auto core = std::make_shared<spark::expert_store>(options);
        try {
            test::attached a(core);
        } catch (const spark::error & e) {
            CHECK(e.status == SPARK_STATUS_OUT_OF_MEMORY || e.status == SPARK_STATUS_IO);
        }
    }
    CHECK(opened > 0);
    printf("       %d of 1500 damaged files opened\n", opened);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // gguf describes each damage at length
    RUN(life_cycle);
    RUN(bad_arguments);
    RUN(errors_belong_to_their_thread);
    RUN(paths);
    RUN(bad_files);
    RUN(bad_tensors);
    RUN(every_prefix_of_the_header);
    RUN(random_damage);
    return test::failures();
}
