// One step of any optimizer: kUnroll slots per thread, whose loads are all issued before anything waits for them.
//
// Bytes per active element: index 2 or 4, or 4 a run; 4 read and 4 written for each fp32 state; compact gradient 2
// or 4. Memory is fetched by 64-byte granules, so the parameter costs 64 read and, where bits change, 64 written, and a
// dense gradient 64 read, for each granule that the mask touches: 1 - (1 - d)^32 of them in bf16 at density d. The
// bandwidth bound is the sum over the copy rate.
//
// A parameter is stored only where its bits change. Stores to single elements all over memory are the most expensive
// part of a step: an H200 writes lone 32-byte sectors at 1.0 to 1.5 TB/s (docs/dev/notebook.md), and in training few
// active weights move by as much as their last bit in one step. Therefore the parameter is read even if a master holds
// its value, unless the caller says that the parameter is the rounded master, or gives a compact copy of it: then no
// dense memory is read. Of the copy 2 or 4 bytes are read, and the sectors written in which an element changes; indices
// of two bytes are read only by threads whose elements change.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/rounding.h"
#include "common/slots.cuh"
#include "step.h"
#include "step/rules/rule.h"

namespace sparse_opt::cuda {

template <typename Layout, typename Param, typename State, int States>
struct StepSlots : Layout {
  using Layout::kUnroll;
  template <typename T>
  using Held = typename Layout::template Held<T>;

  Held<State> states[States];
  Held<Param> param;
  Held<float> master;
  Held<float> gradient;  // the words of one of the gradients' dtype

  // The branches are the same for a whole launch.
  __device__ __forceinline__ void load_params(const StepArguments& args, const void* dense) {
    if (args.master != nullptr) master = this->load_compact(static_cast<const float*>(args.master));
    if (args.weights != nullptr) {
      param = this->load_compact(static_cast<const Param*>(args.weights));
    } else if constexpr (Layout::kReadsDense) {
      if (!args.params_hold_master) param = this->load_dense(static_cast<const Param*>(dense));
    }
  }

  // Before the update, so that the masters are not kept until the stores.
  __device__ __forceinline__ void round_masters(const StepArguments& args) {
    if (!args.params_hold_master) return;
    Param rounded[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) rounded[j] = from_float<Param>(master[j]);
    param.set_all(rounded);
  }

  __device__ __forceinline__ float param_value(int j, const StepArguments& args) const {
    return args.master != nullptr ? master[j] : to_float(param[j]);
  }

  template <bool Stochastic>
  __device__ __forceinline__ void store_params(const float (&values)[kUnroll], const RandomWords (&random)[kUnroll],
                                               void* dense, const StepArguments& args) const {
    if (args.master != nullptr) this->store_compact(args.master, values);
    const bool rounds_up_or_down = Stochastic && args.master == nullptr;
    Param stored[kUnroll];
    bool changed[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      stored[j] =
          rounds_up_or_down ? stochastic_round<Param>(values[j], random[j].param) : from_float<Param>(values[j]);
      changed[j] = this->active(j) && !same_bits(stored[j], param[j]);
    }
    if (args.weights != nullptr) this->store_changed(static_cast<Param*>(args.weights), stored, changed);
    this->store_dense(static_cast<Param*>(dense), stored, changed);
  }

  __device__ __forceinline__ void load_state(int i, const void* compact) {
    states[i] = this->load_compact(static_cast<const State*>(compact));
  }

  template <bool Stochastic>
  __device__ __forceinline__ void store_state(int i, void* compact, const float (&values)[kUnroll],
                                              const RandomWords (&random)[kUnroll]) const {
    State stored[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      stored[j] = Stochastic ? stochastic_round<State>(values[j], random[j].states[i]) : from_float<State>(values[j]);
    }
    this->store_compact(static_cast<State*>(compact), stored);
  }

  template <typename Grad>
  __device__ __forceinline__ void load_gradient_as(const void* compact, const void* dense) {
    Held<Grad> held;
    if constexpr (Layout::kReadsDense) {
      held = compact != nullptr ? this->load_compact(static_cast<const Grad*>(compact))
                                : this->load_dense(static_cast<const Grad*>(dense));
    } else {
      held = this->load_compact(static_cast<const Grad*>(compact));
    }
    memcpy(gradient.words, held.words, sizeof(held.words));
  }

  template <typename Grad>
  __device__ __forceinline__ void gradient_as(float (&g)[kUnroll]) const {
    Held<Grad> held;
    memcpy(held.words, gradient.words, sizeof(held.words));
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) g[j] = to_float(held[j]);
  }

  // The branches are the same for a whole launch. No instruction waits for the loaded words; gradient_values converts
  // them later.
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

// One thread for each tensor: AdamW's scalars are in fp64, with powers whose number of factors grows with the step, and
// every block of the step would begin by waiting for them. Counts the steps, too.
template <typename Rule>
__global__ void __launch_bounds__(kThreads)
    tensor_scalars_kernel(const __grid_constant__ StepArguments args,
                          const __grid_constant__ typename Rule::Options options,
                          typename Rule::TensorScalars* tensors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.segments.count) return;
  float step = args.steps[i];
  if (args.count_steps) {
    if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
    args.steps[i] = step += 1.0f;
  }
  tensors[i] = Rule::tensor_scalars(options, *args.lr, static_cast<int64_t>(step));
}

template <typename Rule, typename Layout, typename Param, typename State, bool Stochastic, int Capacity, int... I>
__device__ __forceinline__ void step_block(const SegmentTable<Capacity>& table, const StepArguments& args,
                                           const typename Rule::CallScalars& call,
                                           const typename Rule::TensorScalars* tensors,
                                           std::integer_sequence<int, I...>) {
  constexpr int kUnroll = Layout::kUnroll;
  const BlockRange range = block_range(table, Layout::kThreads * kUnroll);
  void* dense = table.dense[range.segment];
  const bool has_states = !Rule::kOptionalStates || args.states[0] != nullptr;
  StepSlots<Layout, Param, State, sizeof...(I)> slots;
  slots.find(args.segments, range);
  if (has_states) (slots.load_state(I, args.states[I]), ...);
  slots.load_params(args, dense);
  slots.load_gradient(args, table.companions[range.segment]);
  const int64_t number = table.segment_offset + range.segment;
  const typename Rule::TensorScalars tensor = tensors[number];
  RandomWords random[kUnroll] = {};
  if (Stochastic) {  // while the loads are on their way
    const auto step = static_cast<uint32_t>(static_cast<int64_t>(args.steps[number]));
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) random[j] = random_words(args.seed, slots.slot(j), step);
  }
  if constexpr (Layout::kReadsDense) __syncthreads();  // reads of dense memory before writes, see swap.cu

  const bool branch = Rule::branch(call);
  float g[kUnroll], p[kUnroll], states[sizeof...(I)][kUnroll];
  slots.gradient_values(args, g);
  slots.round_masters(args);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    p[j] = slots.param_value(j, args);
    ((states[I][j] = to_float(slots.states[I][j])), ...);
    Rule::update(call, tensor, branch, g[j], p[j], states[I][j]...);
  }
  if (has_states) (slots.template store_state<Stochastic>(I, args.states[I], states[I], random), ...);
  slots.template store_params<Stochastic>(p, random, dense, args);
}

template <typename Rule, typename Layout, typename Param, typename State, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    step_kernel(const __grid_constant__ SegmentTable<Capacity> table, const __grid_constant__ StepArguments args,
                const __grid_constant__ typename Rule::CallScalars call, const typename Rule::TensorScalars* tensors) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  step_block<Rule, Layout, Param, State, Stochastic>(table, args, call, tensors,
                                                     std::make_integer_sequence<int, kStateCount<Rule>>());
}

// Whether the compact buffers of a step can be moved as vectors.
inline bool fits_vectors(const StepArguments& args) {
  const int state_size = element_size(args.state_dtype);
  return fits_vectors(args.master, sizeof(float)) && fits_vectors(args.weights, element_size(args.param_dtype)) &&
         fits_vectors(args.grad, element_size(args.grad_dtype)) &&
         std::all_of(std::begin(args.states), std::end(args.states),
                     [&](const void* state) { return fits_vectors(state, state_size); });
}

// call.template operator()<Layout>(). The blocks were tuned with bench/kernels on an H200; docs/dev/notebook.md has the
// times.
template <typename Call>
void dispatch_step_layout(const StepArguments& args, Call call) {
  const bool reads_dense = args.dense_grads != nullptr || (args.weights == nullptr && !args.params_hold_master);
  if (!reads_dense && args.segments.index_type == IndexType::kOffset16 && has_element_vectors(args.segments, kUnroll) &&
      fits_vectors(args)) {
    call.template operator()<ElementVectors<uint16_t, kThreads, kUnroll>>();
  } else {
    dispatch_layout<128, 3>(args.segments, has_runs_of_vectors(args.segments) && fits_vectors(args), call);
  }
}

// call.template operator()<Layout, Param, State, Stochastic>()
template <typename Call>
void dispatch_step(const StepArguments& args, Call call) {
  dispatch_dtype(args.param_dtype, [&]<typename Param>() {
    dispatch_step_layout(args, [&]<typename Layout>() {
      if (args.state_dtype == DType::kBFloat16) {
        args.stochastic_rounding ? call.template operator()<Layout, Param, bfloat16, true>()
                                 : call.template operator()<Layout, Param, bfloat16, false>();
      } else {
        args.stochastic_rounding ? call.template operator()<Layout, Param, float, true>()
                                 : call.template operator()<Layout, Param, float, false>();
      }
    });
  });
}

// rules/generate.py writes a source for each rule that instantiates this.
template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, typename Rule::TensorScalars* tensors,
          cudaStream_t stream) {
  const auto count = static_cast<unsigned>(args.segments.count);
  if (count == 0) return;
  tensor_scalars_kernel<Rule><<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args, options, tensors);
  check_launch(Rule::kOp);
  const auto call = Rule::call_scalars(options);
  dispatch_step(args, [&]<typename Layout, typename Param, typename State, bool Stochastic>() {
    for_each_table(args.segments, args.dense_grads, int64_t{Layout::kThreads} * Layout::kUnroll,
                   [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                     if (blocks == 0) return;
                     constexpr auto kKernel = step_kernel<Rule, Layout, Param, State, Stochastic, Capacity>;
                     kKernel<<<blocks, Layout::kThreads, 0, stream>>>(table, args, call, tensors);
                     check_launch(Rule::kOp);
                   });
  });
}

}  // namespace sparse_opt::cuda
