// One step of any optimizer. Bytes per active element with fp32 everything: index 2 or 4 (of a run, shared), 4 read and
// 4 written for each state, compact gradient 4; and for each 64-byte line that the mask touches, 64 read and 64 written
// of the parameter and, with dense gradients, 64 read of the gradient. The bandwidth bound is their sum over the copy
// rate of memory: at 2.5 % a third of all lines is touched, so AdamW moves 0.33 * 192 / 16 + 0.025 * 20 = 4.5 bytes per
// parameter, where dense AdamW moves 28.
#include "step.h"

#include <utility>

#include "common/blocks.h"
#include "common/multiversion.h"
#include "generated/rules.h"

namespace sparse_opt::cpu {
namespace {

SPARSE_OPT_MULTIVERSION
void fill_random(uint64_t seed, uint64_t first_slot, uint32_t step, int64_t n, uint32_t* __restrict param,
                 uint32_t* __restrict first_state, uint32_t* __restrict second_state) {
  for (int64_t k = 0; k < n; ++k) {
    const RandomWords words = random_words(seed, first_slot + k, step);
    param[k] = words.param;
    first_state[k] = words.states[0];
    second_state[k] = words.states[1];
  }
}

SPARSE_OPT_MULTIVERSION
void scale_gradient(const float* grad_scale, const float* clip_coef, int64_t n, float* __restrict g) {
  if (grad_scale != nullptr) {
    for (int64_t k = 0; k < n; ++k) g[k] = gradient_element(g[k], grad_scale, nullptr);
  }
  if (clip_coef != nullptr) {
    for (int64_t k = 0; k < n; ++k) g[k] = gradient_element(g[k], nullptr, clip_coef);
  }
}

// The gradient, the parameter, the states and the random words of one block.
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

template <typename Rule, typename... States>
SPARSE_OPT_MULTIVERSION void update(const typename Rule::CallScalars& call_scalars,
                                    const typename Rule::TensorScalars& tensor_scalars, int64_t n,
                                    const float* __restrict g, float* __restrict p, States* __restrict... states) {
  const auto call = call_scalars;
  const auto tensor = tensor_scalars;
  if (Rule::branch(call)) {
    for (int64_t k = 0; k < n; ++k) Rule::update(call, tensor, true, g[k], p[k], states[k]...);
  } else {
    for (int64_t k = 0; k < n; ++k) Rule::update(call, tensor, false, g[k], p[k], states[k]...);
  }
}

template <typename Rule, size_t... I>
void step_in_blocks(const StepArguments& args, const Chunk& chunk, const typename Rule::CallScalars& call,
                    const typename Rule::TensorScalars& tensor, int64_t step, StepBlock& scratch,
                    std::index_sequence<I...>) {
  const int64_t segment = chunk.segment;
  const auto ahead = [&](const BlockIndices& block) {
    if (args.dense_grads != nullptr) prefetch(args.grad_dtype, args.dense_grads[segment], block);
    if (StepBlock::reads_param(args)) prefetch(args.param_dtype, args.segments.dense[segment], block);
  };
  for_each_block(args.segments, chunk, args.dense_grads != nullptr ? 2 : 1, ahead, [&](const BlockIndices& block) {
    scratch.load(args, segment, step, block);
    float* const states[] = {scratch.load_state(args, I, block)...};
    update<Rule>(call, tensor, block.size, scratch.g, scratch.p, states[I]...);
    (scratch.store_state(args, I, states[I], block), ...);
    scratch.store_param(args, segment, block);
  });
}

}  // namespace

template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, ParallelFor parallel_for) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  if (args.count_steps) {
    for (int64_t i = 0; i < args.segments.count; ++i) args.steps[i] += 1.0f;
  }
  const Work work(args.segments);
  const auto call = Rule::call_scalars(options);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    StepBlock scratch;
    work.for_each_stretch(first, last, [&](const Chunk& chunk) {
      const auto step = static_cast<int64_t>(args.steps[chunk.segment]);
      const auto tensor = Rule::tensor_scalars(options, *args.lr, step);
      constexpr auto kStates = std::make_index_sequence<kStateCount<Rule>>();
      step_in_blocks<Rule>(args, chunk, call, tensor, step, scratch, kStates);
    });
  });
}

#define SPARSE_OPT_INSTANTIATE(Rule) template void step<Rule>(const StepArguments&, const Rule::Options&, ParallelFor);
SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_INSTANTIATE)

}  // namespace sparse_opt::cpu
