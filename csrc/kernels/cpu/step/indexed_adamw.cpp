// Bytes per active element with fp32 everything: index 2 or 4 (of a run, shared), moments 8 read and 8 written, compact
// gradient 4; and for each 64-byte line that the mask touches, 64 read and 64 written of the parameter and, with dense
// gradients, 64 read of the gradient. The floor is their sum over the copy rate of memory: at 2.5 % a third of all
// lines is touched, so 0.33 * 192 / 16 + 0.025 * 20 = 4.5 bytes per parameter, where dense AdamW moves 28.
#include "../../update.h"
#include "../common/multiversion.h"
#include "../kernels.h"
#include "step_block.h"
#include "step_lanes.h"

namespace sparse_opt::cpu {
namespace {

SPARSE_OPT_MULTIVERSION
void update(const AdamWScalars& scalars, int64_t n, const float* __restrict g, float* __restrict p, float* __restrict m,
            float* __restrict v) {
  const AdamWScalars s = scalars;
  if (s.lerps_from_gradient()) {
    for (int64_t k = 0; k < n; ++k) adamw_element(s, true, g[k], p[k], m[k], v[k]);
  } else {
    for (int64_t k = 0; k < n; ++k) adamw_element(s, false, g[k], p[k], m[k], v[k]);
  }
}

}  // namespace

void indexed_adamw(const AdamWArguments& args, ParallelFor parallel_for) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const Work work(args.segments);
  const bool in_lanes = takes_lanes(args);
  const int tensors = args.dense_grads != nullptr ? 2 : 1;
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    StepBlock step_block;
    alignas(64) float exp_avg[kBlock], exp_avg_sq[kBlock];
    work.for_each_stretch(first, last, [&](const Chunk& chunk) {
      const int64_t segment = chunk.segment;
      const auto step = static_cast<int64_t>(args.steps[segment]);
      const auto scalars = adamw_scalars(args, adamw_factors(args), *args.lr, step);
      if (in_lanes) return adamw_lanes(args, chunk, scalars);
      const auto prefetch = [&](const BlockIndices& block) { prefetch_step(args, segment, block); };
      for_each_block(args.segments, chunk, tensors, prefetch, [&](const BlockIndices& block) {
        step_block.load(args, segment, step, block);
        float* m = load_state(args, args.exp_avg, block, exp_avg);
        float* v = load_state(args, args.exp_avg_sq, block, exp_avg_sq);
        update(scalars, block.size, step_block.g, step_block.p, m, v);
        store_state(args, m, step_block.exp_avg_random, block, args.exp_avg);
        store_state(args, v, step_block.exp_avg_sq_random, block, args.exp_avg_sq);
        step_block.store_param(args, segment, block);
      });
    });
  });
}

}  // namespace sparse_opt::cpu
