// Lion, Chen et al., "Symbolic discovery of optimization algorithms", https://arxiv.org/abs/2302.06675.
#pragma once

#include "rule.h"

namespace sparse_opt {

struct Lion : RuleDefaults {
  static constexpr const char* kOp = "indexed_lion_";
  static constexpr const char* kStates[] = {"exp_avg"};

  struct Options {
    double beta1, beta2, weight_decay;

    void for_each(auto visit) {
      visit("beta1", beta1);
      visit("beta2", beta2);
      visit("weight_decay", weight_decay);
    }
  };

  struct CallScalars {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
  };

  struct alignas(8) TensorScalars {
    float decay, lr;
  };

  static CallScalars call_scalars(const Options& options) {
    return {static_cast<float>(options.beta1), static_cast<float>(1.0 - options.beta1),
            static_cast<float>(options.beta2), static_cast<float>(1.0 - options.beta2)};
  }

  SPARSE_OPT_HOST_DEVICE static TensorScalars tensor_scalars(const Options& options, float lr, int64_t) {
    return {decoupled_decay(lr, options.weight_decay), lr};
  }

  SPARSE_OPT_HOST_DEVICE static void update(const CallScalars& call, const TensorScalars& tensor, bool, float g,
                                            float& p, float& m) {
    const float c = m * call.beta1 + g * call.one_minus_beta1;
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c == 0.0f ? 0.0f : c;  // a NaN reaches the parameter
    p = p * tensor.decay;
    p = p - sign * tensor.lr;
    m = m * call.beta2 + g * call.one_minus_beta2;
  }
};

}  // namespace sparse_opt
