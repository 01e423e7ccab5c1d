// What the AdamW and SGD kernels share: the gradient, the parameter and the random words of one block. A block is
// short, so what fp32 needs is inline.
#pragma once

#include "../common/blocks.h"

namespace sparse_opt::cpu {

void fill_random(uint64_t seed, uint64_t first_slot, uint32_t step, int64_t n, uint32_t* param, uint32_t* exp_avg,
                 uint32_t* exp_avg_sq);
void scale_gradient(const float* grad_scale, const float* clip_coef, int64_t n, float* g);

struct StepBlock {
  alignas(64) float p[kBlock];
  alignas(64) float g[kBlock];
  alignas(64) uint32_t param_random[kBlock];
  alignas(64) uint32_t exp_avg_random[kBlock];
  alignas(64) uint32_t exp_avg_sq_random[kBlock];

  // `step` counts from 1 and belongs to the segment.
  void load(const StepArguments& args, int64_t segment, int64_t step, const BlockIndices& block) {
    if (args.grad != nullptr) {
      convert_to_float(args.grad_dtype, at(args.grad, block.begin, element_size(args.grad_dtype)), block.size, g);
    } else {
      gather_as_float(args.grad_dtype, args.dense_grads[segment], block, g);
    }
    if (args.grad_scale != nullptr || args.clip_coef != nullptr) {
      scale_gradient(args.grad_scale, args.clip_coef, block.size, g);
    }
    if (args.master != nullptr) {
      std::memcpy(p, args.master + block.begin, block.size * sizeof(float));
    } else {
      gather_as_float(args.param_dtype, args.segments.dense[segment], block, p);
    }
    if (args.stochastic_rounding) {
      fill_random(args.seed, block.begin, static_cast<uint32_t>(step), block.size, param_random, exp_avg_random,
                  exp_avg_sq_random);
    }
  }

  void store_param(const StepArguments& args, int64_t segment, const BlockIndices& block) const {
    if (args.master != nullptr) std::memcpy(args.master + block.begin, p, block.size * sizeof(float));
    const bool random = args.stochastic_rounding && args.master == nullptr;
    scatter_from_float(args.param_dtype, p, random ? param_random : nullptr, block, args.segments.dense[segment]);
  }
};

inline void prefetch_step(const StepArguments& args, int64_t segment, const BlockIndices& block) {
  if (args.dense_grads != nullptr) prefetch(args.grad_dtype, args.dense_grads[segment], block);
  prefetch(args.param_dtype, args.segments.dense[segment], block);
}

// fp32 state is updated where it stands; bf16 state goes through `scratch`.
inline float* load_state(const StepArguments& args, void* state, const BlockIndices& block, float* scratch) {
  void* source = at(state, block.begin, element_size(args.moment_dtype));
  if (args.moment_dtype == DType::kFloat32) return static_cast<float*>(source);
  convert_to_float(args.moment_dtype, source, block.size, scratch);
  return scratch;
}

inline void store_state(const StepArguments& args, const float* values, const uint32_t* random,
                        const BlockIndices& block, void* state) {
  if (args.moment_dtype == DType::kFloat32) return;
  void* target = at(state, block.begin, element_size(args.moment_dtype));
  if (args.stochastic_rounding) {
    round_stochastically(args.moment_dtype, values, random, block.size, target);
  } else {
    convert_from_float(args.moment_dtype, values, block.size, target);
  }
}

}  // namespace sparse_opt::cpu
