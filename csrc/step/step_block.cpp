#include "step_block.h"

#include "common/multiversion.h"
#include "common/rounding.h"
#include "step/rules/rule.h"

namespace sparse_opt::cpu {

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

}  // namespace sparse_opt::cpu
