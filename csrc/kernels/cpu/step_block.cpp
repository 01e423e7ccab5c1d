#include "step_block.h"

#include "../rounding.h"
#include "../update.h"
#include "multiversion.h"

namespace sparse_opt::cpu {
namespace {

SPARSE_OPT_MULTIVERSION
void fill_random(uint64_t seed, uint64_t first_slot, uint32_t step, int64_t n, uint32_t* __restrict param,
                 uint32_t* __restrict exp_avg, uint32_t* __restrict exp_avg_sq) {
  for (int64_t k = 0; k < n; ++k) {
    const RandomWords words = random_words(seed, first_slot + k, step);
    param[k] = words.param;
    exp_avg[k] = words.exp_avg;
    exp_avg_sq[k] = words.exp_avg_sq;
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

}  // namespace

void StepBlock::load(const StepArguments& args, int64_t segment, int64_t step, const BlockIndices& block) {
  if (args.grad != nullptr) {
    convert_to_float(args.grad_dtype, at(args.grad, block.begin, element_size(args.grad_dtype)), block.size, g);
  } else {
    gather_as_float(args.grad_dtype, args.dense_grads[segment], block, g);
  }
  scale_gradient(args.grad_scale, args.clip_coef, block.size, g);
  if (args.master != nullptr) {
    convert_to_float(DType::kFloat32, args.master + block.begin, block.size, p);
  } else {
    gather_as_float(args.param_dtype, args.segments.dense[segment], block, p);
  }
  if (args.stochastic_rounding) {
    fill_random(args.seed, block.begin, static_cast<uint32_t>(step), block.size, param_random, exp_avg_random,
                exp_avg_sq_random);
  }
}

void StepBlock::store_param(const StepArguments& args, int64_t segment, const BlockIndices& block) const {
  if (args.master != nullptr) convert_from_float(DType::kFloat32, p, block.size, args.master + block.begin);
  const bool random = args.stochastic_rounding && args.master == nullptr;
  scatter_from_float(args.param_dtype, p, random ? param_random : nullptr, block, args.segments.dense[segment]);
}

void prefetch_step(const StepArguments& args, int64_t segment, const BlockIndices& block) {
  if (args.dense_grads != nullptr) prefetch(args.grad_dtype, args.dense_grads[segment], block);
  prefetch(args.param_dtype, args.segments.dense[segment], block);
}

float* load_state(const StepArguments& args, void* state, const BlockIndices& block, float* scratch) {
  void* source = at(state, block.begin, element_size(args.moment_dtype));
  if (args.moment_dtype == DType::kFloat32) return static_cast<float*>(source);
  convert_to_float(args.moment_dtype, source, block.size, scratch);
  return scratch;
}

void store_state(const StepArguments& args, const float* values, const uint32_t* random, const BlockIndices& block,
                 void* state) {
  if (args.moment_dtype == DType::kFloat32) return;
  void* target = at(state, block.begin, element_size(args.moment_dtype));
  if (args.stochastic_rounding) {
    round_stochastically(args.moment_dtype, values, random, block.size, target);
  } else {
    convert_from_float(args.moment_dtype, values, block.size, target);
  }
}

}  // namespace sparse_opt::cpu
