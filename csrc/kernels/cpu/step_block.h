// What the AdamW and SGD kernels share: the gradient, the parameter and the random words of one block.
#pragma once

#include "blocks.h"

namespace sparse_opt::cpu {

struct StepBlock {
  alignas(64) float p[kBlock];
  alignas(64) float g[kBlock];
  alignas(64) uint32_t param_random[kBlock];
  alignas(64) uint32_t exp_avg_random[kBlock];
  alignas(64) uint32_t exp_avg_sq_random[kBlock];

  // `step` counts from 1 and belongs to the segment.
  void load(const StepArguments& args, int64_t segment, int64_t step, const BlockIndices& block);
  void store_param(const StepArguments& args, int64_t segment, const BlockIndices& block) const;
};

void prefetch_step(const StepArguments& args, int64_t segment, const BlockIndices& block);

// fp32 state is updated where it stands; bf16 state goes through `scratch`.
float* load_state(const StepArguments& args, void* state, const BlockIndices& block, float* scratch);
void store_state(const StepArguments& args, const float* values, const uint32_t* random, const BlockIndices& block,
                 void* state);

}  // namespace sparse_opt::cpu
