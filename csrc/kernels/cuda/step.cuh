// What the AdamW and SGD kernels share: kUnroll slots of one thread, their loads issued before anything waits for them.
//
// A parameter is stored only where its bits change. Stores to single elements all over memory are the dearest part of a
// step: an H200 writes lone 32-byte sectors at 1.0 to 1.5 TB/s (docs/performance.md), and in training few active weights
// move by as much as their last bit in one step. That is why the parameter is read even where a master holds its value.
#pragma once

#include "../rounding.h"
#include "../update.h"
#include "dispatch.cuh"
#include "segment_table.cuh"

namespace sparse_opt::cuda {

template <typename Param, typename Index>
struct Slots {
  int64_t first;  // slot j is first + j * kThreads
  bool active[kUnroll];
  Index position[kUnroll];
  Param param[kUnroll];
  float master[kUnroll];

  __device__ __forceinline__ int64_t slot(int j) const { return first + j * kThreads; }

  __device__ __forceinline__ void load_positions(const void* indices, const BlockRange& range) {
    first = range.origin + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      active[j] = slot(j) >= range.begin && slot(j) < range.end;
      position[j] = active[j] ? load_once(static_cast<const Index*>(indices) + slot(j)) : Index{0};
    }
  }

  __device__ __forceinline__ void load_params(const void* dense, const float* compact_master) {
    if (compact_master != nullptr) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (active[j]) master[j] = load_once(compact_master + slot(j));
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (active[j]) param[j] = static_cast<const Param*>(dense)[position[j]];
    }
  }

  __device__ __forceinline__ float param_value(int j, const float* compact_master) const {
    return compact_master != nullptr ? master[j] : to_float(param[j]);
  }

  template <bool Stochastic>
  __device__ __forceinline__ void store_param(int j, float value, uint32_t random, void* dense,
                                              float* compact_master) const {
    Param stored;
    if (compact_master != nullptr) {
      store_once(compact_master + slot(j), value);
      stored = from_float<Param>(value);
    } else {
      stored = Stochastic ? stochastic_round<Param>(value, random) : from_float<Param>(value);
    }
    if (!same_bits(stored, param[j])) static_cast<Param*>(dense)[position[j]] = stored;
  }

  template <typename State>
  __device__ __forceinline__ void load_state(const void* state, State (&values)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (active[j]) values[j] = load_once(static_cast<const State*>(state) + slot(j));
    }
  }

  template <bool Stochastic, typename State>
  __device__ __forceinline__ void store_state(int j, float value, uint32_t random, void* state) const {
    const State stored = Stochastic ? stochastic_round<State>(value, random) : from_float<State>(value);
    store_once(static_cast<State*>(state) + slot(j), stored);
  }

  template <typename Grad>
  __device__ __forceinline__ void load_gradients_as(const void* compact, const void* dense, float (&g)[kUnroll]) const {
    Grad raw[kUnroll] = {};
    if (compact != nullptr) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (active[j]) raw[j] = load_once(static_cast<const Grad*>(compact) + slot(j));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (active[j]) raw[j] = static_cast<const Grad*>(dense)[position[j]];
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) g[j] = to_float(raw[j]);
  }

  // The branches are the same for a whole launch. To be called after the other loads: it waits for its own.
  __device__ __forceinline__ void load_gradients(const StepArguments& args, const void* dense_grad,
                                                 float (&g)[kUnroll]) const {
    switch (args.grad_dtype) {
      case DType::kFloat32:
        load_gradients_as<float>(args.grad, dense_grad, g);
        break;
      case DType::kBFloat16:
        load_gradients_as<bfloat16>(args.grad, dense_grad, g);
        break;
      case DType::kFloat16:
        load_gradients_as<float16>(args.grad, dense_grad, g);
        break;
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) g[j] = gradient_element(g[j], args.grad_scale, args.clip_coef);
  }
};

}  // namespace sparse_opt::cuda
