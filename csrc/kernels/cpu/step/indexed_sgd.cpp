// Bytes per active element with fp32 everything: index 2 or 4 (of a run, shared), momentum 4 read and 4 written,
// compact gradient 4; parameter and dense gradient by the line, as in indexed_adamw.cpp.
#include "../../update.h"
#include "../common/multiversion.h"
#include "../kernels.h"
#include "step_block.h"
#include "step_lanes.h"

namespace sparse_opt::cpu {
namespace {

SPARSE_OPT_MULTIVERSION
void update(const SgdScalars& scalars, int64_t n, const float* __restrict g, float* __restrict p, float* __restrict b) {
  const SgdScalars s = scalars;
  for (int64_t k = 0; k < n; ++k) sgd_element(s, g[k], p[k], b[k]);
}

}  // namespace

void indexed_sgd(const SgdArguments& args, ParallelFor parallel_for) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const Work work(args.segments);
  const bool in_lanes = takes_lanes(args);
  const int tensors = args.dense_grads != nullptr ? 2 : 1;
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    StepBlock step_block;
    alignas(64) float momentum_buffer[kBlock] = {};
    work.for_each_stretch(first, last, [&](const Chunk& chunk) {
      const int64_t segment = chunk.segment;
      const auto step = static_cast<int64_t>(args.steps[segment]);
      const auto scalars = sgd_scalars(args, *args.lr, step);
      if (in_lanes) return sgd_lanes(args, chunk, scalars);
      const auto prefetch = [&](const BlockIndices& block) { prefetch_step(args, segment, block); };
      for_each_block(args.segments, chunk, tensors, prefetch, [&](const BlockIndices& block) {
        step_block.load(args, segment, step, block);
        float* b = momentum_buffer;
        if (scalars.has_momentum) b = load_state(args, args.momentum_buffer, block, momentum_buffer);
        update(scalars, block.size, step_block.g, step_block.p, b);
        if (scalars.has_momentum) store_state(args, b, step_block.exp_avg_random, block, args.momentum_buffer);
        step_block.store_param(args, segment, block);
      });
    });
  });
}

}  // namespace sparse_opt::cpu
