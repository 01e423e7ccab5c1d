// What the AdamW and SGD kernels share: kUnroll slots of one thread, their loads issued before anything waits for them.
//
// A parameter is stored only where its bits change. Stores to single elements all over memory are the dearest part of a
// step: an H200 writes lone 32-byte sectors at 1.0 to 1.5 TB/s (docs/performance.md), and in training few active
// weights move by as much as their last bit in one step. That is why the parameter is read even where a master holds
// its value.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "../../rounding.h"
#include "../../update.h"
#include "../common/slots.cuh"

namespace sparse_opt::cuda {

template <typename Layout, typename Param>
struct StepSlots : Layout {
  using Layout::kUnroll;
  template <typename T>
  using Held = typename Layout::template Held<T>;

  Held<Param> param;
  Held<float> master;
  Held<float> gradient;  // the words of one of the gradients' dtype

  __device__ __forceinline__ void load_params(const void* dense, const float* compact_master) {
    if (compact_master != nullptr) master = this->load_compact(compact_master);
    param = this->load_dense(static_cast<const Param*>(dense));
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
  __device__ __forceinline__ void load_gradient_as(const void* compact, const void* dense) {
    const Held<Grad> held = compact != nullptr ? this->load_compact(static_cast<const Grad*>(compact))
                                               : this->load_dense(static_cast<const Grad*>(dense));
    memcpy(gradient.words, held.words, sizeof(held.words));
  }

  template <typename Grad>
  __device__ __forceinline__ void gradient_as(float (&g)[kUnroll]) const {
    Held<Grad> held;
    memcpy(held.words, gradient.words, sizeof(held.words));
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) g[j] = to_float(held[j]);
  }

  // The branches are the same for a whole launch. Nothing waits for what is loaded: gradient_values converts it.
  __device__ __forceinline__ void load_gradient(const StepArguments& args, const void* dense) {
    switch (args.grad_dtype) {
      case DType::kFloat32:
        load_gradient_as<float>(args.grad, dense);
        break;
      case DType::kBFloat16:
        load_gradient_as<bfloat16>(args.grad, dense);
        break;
      case DType::kFloat16:
        load_gradient_as<float16>(args.grad, dense);
        break;
    }
  }

  __device__ __forceinline__ void gradient_values(const StepArguments& args, float (&g)[kUnroll]) const {
    switch (args.grad_dtype) {
      case DType::kFloat32:
        gradient_as<float>(g);
        break;
      case DType::kBFloat16:
        gradient_as<bfloat16>(g);
        break;
      case DType::kFloat16:
        gradient_as<float16>(g);
        break;
    }
    if (args.grad_scale != nullptr || args.clip_coef != nullptr) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) g[j] = gradient_element(g[j], args.grad_scale, args.clip_coef);
    }
  }
};

// Whether the compact buffers of a step can be moved as vectors.
inline bool moves_vectors(const StepArguments& args, std::initializer_list<const void*> states) {
  const int state_size = element_size(args.moment_dtype);
  return has_runs_of_vectors(args.segments) && fits_vectors(args.master, sizeof(float)) &&
         fits_vectors(args.grad, element_size(args.grad_dtype)) &&
         std::all_of(states.begin(), states.end(), [&](const void* state) { return fits_vectors(state, state_size); });
}

// Where elements lie far apart, and each has a line of the parameter and one of its gradient, few at a time. On an
// H200, of 2.5 % of 3.2 B bf16 weights, where all change and where few do (lr 1e-6): 3.17 and 2.02 ms with two blocks
// of 608 single elements, 3.19 and 2.00 with 672, 3.06 and 2.11 with 480; as where elements lie close, 3.42 and 1.99.
// Few change in training. From compact gradients blocks of 608 would take 2.63 and 1.49 for 2.98 and 1.22.
template <typename Call>
void dispatch_step_layout(const StepArguments& args, std::initializer_list<const void*> states, Call call) {
  const bool far_apart = args.dense_grads != nullptr && is_scattered(args.segments, element_size(args.param_dtype));
  if (far_apart && args.segments.index_type == IndexType::kOffset16) {
    call.template operator()<ElementSlots<uint16_t, 640, 1, 2>>();
  } else if (far_apart && args.segments.index_type == IndexType::kInt32) {
    call.template operator()<ElementSlots<int32_t, 640, 1, 2>>();
  } else {
    // Of 10 % of 3.2 B bf16 weights on an H200, over many steps at lr 1e-3, in ms:
    //
    //   gradients, moments       compact, bf16   compact, fp32   dense, bf16   dense, fp32
    //   128 threads, 4 slots              4.80            4.50          4.96          5.34   (spills with bf16)
    //   256 threads, 4 slots              4.92            4.45          5.12          5.25
    //   128 threads, 3 slots              4.00            4.44          4.73          5.30
    //   64 threads, 3 slots               3.97            4.41          4.74          5.33
    //   128 threads, 2 slots              4.16            4.43          4.78          5.19
    dispatch_layout<128, 3>(args.segments, moves_vectors(args, states), call);
  }
}

// Shared memory that a block of `kernel` asks for and does not use, so that no more than Layout::kMostBlocks of them
// are on a multiprocessor at a time: parts of so little that the L1 cache keeps its size.
template <typename Layout, auto kKernel>
size_t unused_shared_memory() {
  if constexpr (Layout::kMostBlocks == 0) {
    return 0;
  } else {
    constexpr int kAll = 16384, kReserved = 1152;  // bytes, of all blocks, and of each by the driver and to spare
    prefer_shared_memory<kKernel>(kAll);
    return kAll / Layout::kMostBlocks - kReserved;
  }
}

// call.template operator()<Layout, Param, Moment, Stochastic>()
template <typename Call>
void dispatch_step(const StepArguments& args, std::initializer_list<const void*> states, Call call) {
  dispatch_dtype(args.param_dtype, [&]<typename Param>() {
    dispatch_step_layout(args, states, [&]<typename Layout>() {
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
