// The gradient, the parameter, the states and the random words of one block of a step.
#pragma once

#include "common/blocks.h"

namespace sparse_opt::cpu {

void fill_random(uint64_t seed, uint64_t first_slot, uint32_t step, int64_t n, uint32_t* param, uint32_t* first_state,
                 uint32_t* second_state);
void scale_gradient(const float* grad_scale, const float* clip_coef, int64_t n, float* g);

// A block is short, so the part that fp32 needs is inline.
struct StepBlock {
  alignas(64) float p[kBlock];
  alignas(64) float g[kBlock];
  // Words of the parameters' size, before and after the step, where it does not read the parameters.
  alignas(64) uint32_t held[kBlock], stored[kBlock];
  alignas(64) float states[kMaxStates][kBlock] = {};
  alignas(64) uint32_t param_random[kBlock];
  alignas(64) uint32_t state_random[kMaxStates][kBlock];

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
    const int param_size = element_size(args.param_dtype);
    if (args.master != nullptr) {
      std::memcpy(p, args.master + block.begin, block.size * sizeof(float));
      if (args.params_hold_master) convert_from_float(args.param_dtype, p, block.size, held);
    } else if (args.weights != nullptr) {
      std::memcpy(held, at(args.weights, block.begin, param_size), block.size * param_size);
      convert_to_float(args.param_dtype, held, block.size, p);
    } else {
      gather_as_float(args.param_dtype, args.segments.dense[segment], block, p);
    }
    if (args.stochastic_rounding) {
      static_assert(kMaxStates == 2);
      fill_random(args.seed, block.begin, static_cast<uint32_t>(step), block.size, param_random, state_random[0],
                  state_random[1]);
    }
  }

  void store_param(const StepArguments& args, int64_t segment, const BlockIndices& block) {
    if (args.master != nullptr) std::memcpy(args.master + block.begin, p, block.size * sizeof(float));
    const bool random = args.stochastic_rounding && args.master == nullptr;
    if (reads_param(args)) {
      scatter_from_float(args.param_dtype, p, random ? param_random : nullptr, block, args.segments.dense[segment]);
      return;
    }
    const int param_size = element_size(args.param_dtype);
    if (random && args.param_dtype != DType::kFloat32) {
      round_stochastically(args.param_dtype, p, param_random, block.size, stored);
    } else {
      convert_from_float(args.param_dtype, p, block.size, stored);
    }
    scatter_changed(param_size, held, stored, block, args.segments.dense[segment]);
    if (args.weights != nullptr) {
      std::memcpy(at(args.weights, block.begin, param_size), stored, block.size * param_size);
    }
  }

  static bool reads_param(const StepArguments& args) { return args.weights == nullptr && !args.params_hold_master; }

  // fp32 states are updated in place; bf16 states, and those that the call does not use, are in `states`.
  float* load_state(const StepArguments& args, size_t i, const BlockIndices& block) {
    if (args.states[i] == nullptr) return states[i];
    void* source = at(args.states[i], block.begin, element_size(args.state_dtype));
    if (args.state_dtype == DType::kFloat32) return static_cast<float*>(source);
    convert_to_float(args.state_dtype, source, block.size, states[i]);
    return states[i];
  }

  void store_state(const StepArguments& args, size_t i, const float* values, const BlockIndices& block) const {
    if (args.states[i] == nullptr || args.state_dtype == DType::kFloat32) return;
    void* target = at(args.states[i], block.begin, element_size(args.state_dtype));
    if (args.stochastic_rounding) {
      round_stochastically(args.state_dtype, values, state_random[i], block.size, target);
    } else {
      convert_from_float(args.state_dtype, values, block.size, target);
    }
  }
};

inline void prefetch_step(const StepArguments& args, int64_t segment, const BlockIndices& block) {
  if (args.dense_grads != nullptr) prefetch(args.grad_dtype, args.dense_grads[segment], block);
  if (StepBlock::reads_param(args)) prefetch(args.param_dtype, args.segments.dense[segment], block);
}

}  // namespace sparse_opt::cpu
