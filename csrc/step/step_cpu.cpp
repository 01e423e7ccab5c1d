// One step of any optimizer. Bytes per active element with fp32 everything: index 2 or 4 (of a run, shared), 4 read and
// 4 written for each state, compact gradient 4; and for each 64-byte line that the mask touches, 64 read and 64 written
// of the parameter and, with dense gradients, 64 read of the gradient. The bandwidth bound is their sum over the copy
// rate of memory: at 2.5 % a third of all lines is touched, so AdamW moves 0.33 * 192 / 16 + 0.025 * 20 = 4.5 bytes per
// parameter, where dense AdamW moves 28.
#include <utility>

#include "common/cpu_kernels.h"
#include "common/multiversion.h"
#include "generated/rules.h"
#include "step_block.h"

namespace sparse_opt::cpu {
namespace {

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
  const auto prefetch = [&](const BlockIndices& block) { prefetch_step(args, segment, block); };
  for_each_block(args.segments, chunk, args.dense_grads != nullptr ? 2 : 1, prefetch, [&](const BlockIndices& block) {
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
