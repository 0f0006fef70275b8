#include "buffer_type.h"

#include "expert_store.h"
#include "route.h"
#include "status.h"

#include "ggml-backend-impl.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace spark {

namespace {

struct buffer_type {
    std::weak_ptr<expert_store> store; // a store may be freed before its buffer type, which never is
    ggml_backend_buffer_type type = {};
    llama_model_tensor_buft_override overrides[2] = {};
};

// Address space for what llama.cpp thinks lies in the buffer. Experts do not: they get their stacks' addresses. Other
// tensors (LoRA pairs are allocated in the buffer type of the weight they belong to) do, and their pages become usable.
struct buffer {
    std::shared_ptr<expert_store> store;
    bool   attached = false;
    void * base     = nullptr;
    size_t size     = 0;

    ~buffer() {
        if (base) {
            device() ? device()->unreserve(base, size) : (void) munmap(base, size);
        }
        if (attached) { store->detach(); }
    }

    device_residency * device() const { return store->device.get(); }
};

buffer * get_buffer(ggml_backend_buffer_t b) { return (buffer *) b->context; }

void buffer_free(ggml_backend_buffer_t b) {
    delete get_buffer(b);
}

void * buffer_get_base(ggml_backend_buffer_t b) {
    return get_buffer(b)->base;
}

ggml_status init_other_tensor(const buffer & buf, ggml_tensor * tensor) {
    const size_t page  = sysconf(_SC_PAGESIZE);
    const size_t begin = ((char *) tensor->data - (char *) buf.base) / page * page;
    const size_t end   = (char *) tensor->data + ggml_nbytes(tensor) - (char *) buf.base;
    if (buf.device()) {
        // up to the padding that matrix kernels read
        const size_t size = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(buf.device()->backend_device()), tensor);
        if (guard([&] { buf.device()->use(buf.base, begin, begin + std::max(size, end - begin)); }) == SPARK_STATUS_OK) {
            return GGML_STATUS_SUCCESS;
        }
        log(log_level::error, "cannot allocate %zu bytes for tensor '%s': %s", size, tensor->name, last_error());
        return GGML_STATUS_ALLOC_FAILED;
    }
    if (mprotect((char *) buf.base + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
        log(log_level::error, "cannot allocate %zu bytes for tensor '%s': %s", end - begin, tensor->name, strerror(errno));
        return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t b, ggml_tensor * tensor) {
    const buffer & buf = *get_buffer(b);
    expert_stack * stack = tensor->view_src ? nullptr : buf.store->find_stack(tensor->name);
    if (!stack) {
        return init_other_tensor(buf, tensor);
    }
    const expert_tensor & t = *stack->tensor;
    if (tensor->type != t.type || tensor->ne[0] != t.ne0 || tensor->ne[1] != t.ne1 || tensor->ne[2] != t.n_expert || tensor->nb[2] != t.stride) {
        log(log_level::error, "tensor '%s' of the model is not the one in '%s': a store loads its own file and no other",
            tensor->name, buf.store->file.shards[t.shard].path.c_str());
        return GGML_STATUS_FAILED;
    }
    if (stack->hook.stack->buffer) {
        log(log_level::error, "tensor '%s': this store already serves a loaded model; make one store for each model", tensor->name);
        return GGML_STATUS_FAILED;
    }
    stack->hook.route  = route;
    stack->hook.finish = finish;
    stack->hook.stack->buffer = b;
    tensor->extra  = &stack->hook;
    tensor->flags |= GGML_TENSOR_FLAG_EXPERT_STACK;
    // whoever reads the weight without the hook finds every expert in its home
    tensor->data = stack->memory->base() + (size_t) stack->layer->home_slot * t.stride;
    return GGML_STATUS_SUCCESS;
}

// Copies that a device refuses leave it in a state nothing can go on from; ggml's own buffers abort there too.
void require_ok(int32_t status) {
    if (status != SPARK_STATUS_OK) {
        GGML_ABORT("spark: %s", last_error());
    }
}

void buffer_memset_tensor(ggml_backend_buffer_t b, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    device_residency * device = get_buffer(b)->device();
    if (tensor->flags & GGML_TENSOR_FLAG_EXPERT_STACK) {
        return;
    }
    if (device) {
        require_ok(guard([&] { device->set((char *) tensor->data + offset, value, size); }));
    } else {
        memset((char *) tensor->data + offset, value, size);
    }
}

void buffer_set_tensor(ggml_backend_buffer_t b, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    device_residency * device = get_buffer(b)->device();
    if (tensor->flags & GGML_TENSOR_FLAG_EXPERT_STACK) {
        return; // experts come from the file
    }
    if (device) {
        require_ok(guard([&] { device->copy((char *) tensor->data + offset, data, size); }));
    } else {
        memcpy((char *) tensor->data + offset, data, size);
    }
}

void buffer_get_tensor(ggml_backend_buffer_t b, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    device_residency * device = get_buffer(b)->device();
    if (device) {
        require_ok(guard([&] { device->copy(data, (const char *) tensor->data + offset, size); }));
    } else {
        memcpy(data, (const char *) tensor->data + offset, size);
    }
}

void buffer_clear(ggml_backend_buffer_t b, uint8_t value) {
    (void) b; (void) value; // pages that are not in use yet are zero, and experts are never cleared
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

const char * type_get_name(ggml_backend_buffer_type_t type) {
    (void) type;
    return SPARK_EXPERT_BUFFER_NAME;
}

size_t type_get_alignment(ggml_backend_buffer_type_t type) {
    (void) type;
    return sysconf(_SC_PAGESIZE); // each tensor has its own pages
}

bool type_is_host(ggml_backend_buffer_type_t type) {
    (void) type;
    return true;
}

bool type_is_not_host(ggml_backend_buffer_type_t type) {
    (void) type;
    return false;
}

ggml_backend_buffer_t type_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    auto buf = std::make_unique<buffer>();
    buf->store = ((buffer_type *) type->context)->store.lock();
    if (!buf->store) {
        log(log_level::error, "the expert store of this model was freed before the model was loaded");
        return nullptr;
    }
    const int32_t status = guard([&] {
        buf->size = size > 0 ? size : 1;
        if (buf->device()) {
            if (size > 0) {
                buf->store->attach();
                buf->attached = true;
                buf->base = buf->device()->reserve(buf->size);
            }
            return;
        }
        buf->base = mmap(nullptr, buf->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (buf->base == MAP_FAILED) {
            buf->base = nullptr;
            throw error(SPARK_STATUS_OUT_OF_MEMORY, format("cannot reserve %zu bytes of address space: %s", size, strerror(errno)));
        }
        if (size > 0) { // llama.cpp asks for an empty buffer when it only measures
            buf->store->attach();
            buf->attached = true;
        }
    });
    if (status != SPARK_STATUS_OK) {
        log(log_level::error, "%s", last_error());
        return nullptr;
    }
    return ggml_backend_buffer_init(type, buffer_interface, buf.release(), size);
}

} // namespace

const llama_model_tensor_buft_override * make_overrides(const std::shared_ptr<expert_store> & store) {
    buffer_type * type = new buffer_type; // never freed, see the header
    type->store = store;
    type->type.iface   = {
        /* .get_name         = */ type_get_name,
        /* .alloc_buffer     = */ type_alloc_buffer,
        /* .get_alignment    = */ type_get_alignment,
        /* .get_max_size     = */ nullptr,
        /* .get_alloc_size   = */ nullptr,
        /* .is_host          = */ store->device ? type_is_not_host : type_is_host,
    };
    type->type.device  = store->device ? store->device->backend_device() : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    type->type.context = type;
    type->overrides[0] = { "\\.ffn_(gate|up|down|gate_up)_exps\\.weight$", &type->type };
    type->overrides[1] = { nullptr, nullptr };
    return type->overrides;
}

} // namespace spark
