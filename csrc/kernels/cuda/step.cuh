// What the AdamW and SGD kernels share: kUnroll slots of one thread, their loads issued before anything waits for them.
//
// A parameter is stored only where its bits change. Stores to single elements all over memory are the dearest part of a
// step: an H200 writes lone 32-byte sectors at 1.0 to 1.5 TB/s (docs/performance.md), and in training few active
// weights move by as much as their last bit in one step. That is why the parameter is read even where a master holds
// its value.
#pragma once

#include "../rounding.h"
#include "../update.h"
#include "slots.cuh"

namespace sparse_opt::cuda {

template <typename Layout, typename Param>
struct StepSlots : Layout {
  Param param[kUnroll];
  float master[kUnroll];

  __device__ __forceinline__ void load_params(const void* dense, const float* compact_master) {
    if (compact_master != nullptr) this->load_compact(compact_master, master);
    this->load_dense(static_cast<const Param*>(dense), param);
  }

  __device__ __forceinline__ float param_value(int j, const float* compact_master) const {
    return compact_master != nullptr ? master[j] : to_float(param[j]);
  }

  template <bool Stochastic>
  __device__ __forceinline__ void store_params(const float (&values)[kUnroll], const RandomWords (&random)[kUnroll],
                                               void* dense, float* compact_master) const {
    if (compact_master != nullptr) this->store_compact(compact_master, values);
    const bool rounds_up_or_down = Stochastic && compact_master == nullptr;
    Param stored[kUnroll];
    bool changed[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      stored[j] =
          rounds_up_or_down ? stochastic_round<Param>(values[j], random[j].param) : from_float<Param>(values[j]);
      changed[j] = this->active(j) && !same_bits(stored[j], param[j]);
    }
    this->store_dense(static_cast<Param*>(dense), stored, changed);
  }

  template <bool Stochastic, typename State>
  __device__ __forceinline__ void store_state(State* state, const float (&values)[kUnroll],
                                              const uint32_t (&random)[kUnroll]) const {
    State stored[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      stored[j] = Stochastic ? stochastic_round<State>(values[j], random[j]) : from_float<State>(values[j]);
    }
    this->store_compact(state, stored);
  }

  template <typename Grad>
  __device__ __forceinline__ void load_gradients_as(const void* compact, const void* dense, float (&g)[kUnroll]) const {
    Grad raw[kUnroll] = {};
    if (compact != nullptr) {
      this->load_compact(static_cast<const Grad*>(compact), raw);
    } else {
      this->load_dense(static_cast<const Grad*>(dense), raw);
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

// call.template operator()<Layout, Param, Moment, Stochastic>()
template <typename Call>
void dispatch_step(const StepArguments& args, Call call) {
  dispatch_dtype(args.param_dtype, [&]<typename Param>() {
    dispatch_layout(args.segments, [&]<typename Layout>() {
      if (args.moment_dtype == DType::kBFloat16) {
        args.stochastic_rounding ? call.template operator()<Layout, Param, bfloat16, true>()
                                 : call.template operator()<Layout, Param, bfloat16, false>();
      } else {
        args.stochastic_rounding ? call.template operator()<Layout, Param, float, true>()
                                 : call.template operator()<Layout, Param, float, false>();
      }
    });
  });
}

}  // namespace sparse_opt::cuda
