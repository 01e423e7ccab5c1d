// AdamW, Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
//
// exp_avg moves towards the gradient as in torch.lerp (ATen/native/Lerp.h), which starts from the nearer end:
// m + (g - m) * weight for a weight 1 - beta1 below 1/2, else g - (g - m) * (1 - weight). The first formula alone would
// lose a small gradient in g - m.
#pragma once

#include "rule.h"

namespace sparse_opt {

struct AdamW : RuleDefaults {
  static constexpr const char* kOp = "indexed_adamw_";
  static constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq"};

  struct Options {
    double beta1, beta2, eps, weight_decay;

    void for_each(auto visit) {
      visit("beta1", beta1);
      visit("beta2", beta2);
      visit("eps", eps);
      visit("weight_decay", weight_decay);
    }
  };

  struct CallScalars {
    float lerp_factor, beta2, one_minus_beta2, eps;  // lerp_factor: weight, or -(1 - weight) to start from the gradient
  };

  struct alignas(16) TensorScalars {
    float decay, sqrt_bias_correction2, step_size;
  };

  static CallScalars call_scalars(const Options& options) {
    const auto weight = static_cast<float>(1.0 - options.beta1);
    return {weight < 0.5f ? weight : -(1.0f - weight), static_cast<float>(options.beta2),
            static_cast<float>(1.0 - options.beta2), static_cast<float>(options.eps)};
  }

  // base^exponent by repeated squaring, in fp64: 1 - beta^t loses its digits in fp32 at small t.
  SPARSE_OPT_HOST_DEVICE static double integer_power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
      if (exponent & 1) result *= base;
      base *= base;
    }
    return result;
  }

  SPARSE_OPT_HOST_DEVICE static TensorScalars tensor_scalars(const Options& options, float lr, int64_t step) {
    return {decoupled_decay(lr, options.weight_decay),
            static_cast<float>(sqrt(1.0 - integer_power(options.beta2, step))),
            static_cast<float>(static_cast<double>(lr) / (1.0 - integer_power(options.beta1, step)))};
  }

  // Whether exp_avg starts from the gradient. Where vector loops chose for each vector, GCC spilled results to the
  // stack, and the fp32 step from compact gradients was 4 % slower on a Zen 4 core.
  SPARSE_OPT_HOST_DEVICE static bool branch(const CallScalars& call) { return call.lerp_factor <= 0.0f; }

  SPARSE_OPT_HOST_DEVICE static void update(const CallScalars& call, const TensorScalars& tensor,
                                            bool lerps_from_gradient, float g, float& p, float& m, float& v) {
    m = (lerps_from_gradient ? g : m) + (g - m) * call.lerp_factor;
    v = v * call.beta2 + (g * g) * call.one_minus_beta2;
    const float denom = sqrtf(v) / tensor.sqrt_bias_correction2 + call.eps;
    p = p * tensor.decay - (m / denom) * tensor.step_size;
  }
};

}  // namespace sparse_opt
