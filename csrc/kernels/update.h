// The arithmetic of one element, written once for both devices: fp32, and every operation rounded on its own, so that
// all backends give the same bits. Needs -ffp-contract=off (host) and --fmad=false (nvcc).
#pragma once

#include <cmath>
#include <cstdint>

#include "arguments.h"
#include "host_device.h"

namespace sparse_opt {

// base^exponent in fp64 by repeated squaring: 1 - beta^t loses its digits in fp32 at small t.
SPARSE_OPT_HOST_DEVICE double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

SPARSE_OPT_HOST_DEVICE float gradient_element(float g, const float* grad_scale, const float* clip_coef) {
  if (grad_scale != nullptr) g = g / *grad_scale;
  if (clip_coef != nullptr) g = g * *clip_coef;
  return g;
}

// Decoupled weight decay, Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. The factors belong to the call, the
// scalars to one tensor of it.
//
// exp_avg moves towards the gradient as in torch.lerp (ATen/native/Lerp.h), which starts from the nearer end:
// m + (g - m) * weight for a weight 1 - beta1 below 1/2, else g - (g - m) * (1 - weight). The first formula alone would
// lose a small gradient in g - m. lerp_factor is weight or -(1 - weight).
struct AdamWFactors {
  float lerp_factor, beta2, one_minus_beta2, eps;

  SPARSE_OPT_HOST_DEVICE bool lerps_from_gradient() const { return lerp_factor <= 0.0f; }
};

struct AdamWScalars : AdamWFactors {
  float decay, sqrt_bias_correction2, step_size;
};

inline AdamWFactors adamw_factors(const AdamWArguments& args) {
  const auto weight = static_cast<float>(1.0 - args.beta1);
  return {weight < 0.5f ? weight : -(1.0f - weight), static_cast<float>(args.beta2),
          static_cast<float>(1.0 - args.beta2), static_cast<float>(args.eps)};
}

SPARSE_OPT_HOST_DEVICE AdamWScalars adamw_scalars(const AdamWArguments& args, const AdamWFactors& factors, float lr,
                                                  int64_t step) {
  AdamWScalars s{factors};
  s.decay = 1.0f - lr * static_cast<float>(args.weight_decay);
  s.sqrt_bias_correction2 = static_cast<float>(sqrt(1.0 - integer_power(args.beta2, step)));
  s.step_size = static_cast<float>(static_cast<double>(lr) / (1.0 - integer_power(args.beta1, step)));
  return s;
}

// `lerps_from_gradient` is that of `s`. Vector loops pass a constant: where they chose for each vector, GCC spilled
// results to the stack, and the fp32 step from compact gradients was 4 % slower on a Zen 4 core.
SPARSE_OPT_HOST_DEVICE void adamw_element(const AdamWScalars& s, bool lerps_from_gradient, float g, float& p, float& m,
                                          float& v) {
  m = (lerps_from_gradient ? g : m) + (g - m) * s.lerp_factor;
  v = v * s.beta2 + (g * g) * s.one_minus_beta2;
  const float denom = sqrtf(v) / s.sqrt_bias_correction2 + s.eps;
  p = p * s.decay - (m / denom) * s.step_size;
}

struct SgdScalars {
  float lr, momentum, one_minus_dampening, weight_decay;
  bool has_momentum, first_step, nesterov;
};

SPARSE_OPT_HOST_DEVICE SgdScalars sgd_scalars(const SgdArguments& args, float lr, int64_t step) {
  SgdScalars s;
  s.lr = lr;
  s.momentum = static_cast<float>(args.momentum);
  s.one_minus_dampening = static_cast<float>(1.0 - args.dampening);
  s.weight_decay = static_cast<float>(args.weight_decay);
  s.has_momentum = args.momentum_buffer != nullptr && args.momentum != 0.0;
  s.first_step = step == 1;
  s.nesterov = args.nesterov;
  return s;
}

SPARSE_OPT_HOST_DEVICE void sgd_element(const SgdScalars& s, float g, float& p, float& b) {
  if (s.weight_decay != 0.0f) g = g + p * s.weight_decay;
  if (s.has_momentum) {
    b = s.first_step ? g : b * s.momentum + g * s.one_minus_dampening;
    g = s.nesterov ? g + b * s.momentum : b;
  }
  p = p - g * s.lr;
}

}  // namespace sparse_opt
