// The buffer type through which llama.cpp loads a model whose experts live in a store.
#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <memory>

namespace spark {

class expert_store;

// Overrides that send the expert weights of a model to the store; the array ends with {NULL, NULL} and lives as long as
// the process, since a loaded model may keep the pointer.
const llama_model_tensor_buft_override * make_overrides(const std::shared_ptr<expert_store> & store);

} // namespace spark
