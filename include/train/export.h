// Whole tensors from shards and back, by Hugging Face name.
#pragma once

#include <functional>
#include <string>

#include "comm/gather.h"
#include "io/hf_weights.h"
#include "model/qwen3_model.h"

namespace qshard {

enum class ExportWhat { weights, gradients };  // f32 master weights; reduced gradients

// From the mesh's first replica, rank 0 writes one f32 safetensors file, values times `scale`,
// holding one tensor at a time; a tied head is not stored. Collective.
void export_model(const Mesh& mesh, Qwen3Model& model, ExportWhat what, const std::string& path,
                  float scale = 1);

// Every rank reads its own rows of the f32, bf16 or fp16 tensors, after HfWeights::require. A tied
// model's head that is not the embedding is ignored and `warn` called on rank 0. Collective.
void import_weights(const World& world, Qwen3Model& model, const HfWeights& weights,
                    const std::function<void(const std::string&)>& warn);

}  // namespace qshard
