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

// Decoupled weight decay, Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. The factors are the call's, the
// scalars beside them a tensor's.
struct AdamWFactors {
  float one_minus_beta1, beta2, one_minus_beta2, eps;
};

struct AdamWScalars : AdamWFactors {
  float decay, sqrt_bias_correction2, step_size;
};

inline AdamWFactors adamw_factors(const AdamWArguments& args) {
  return {static_cast<float>(1.0 - args.beta1), static_cast<float>(args.beta2), static_cast<float>(1.0 - args.beta2),
          static_cast<float>(args.eps)};
}

SPARSE_OPT_HOST_DEVICE AdamWScalars adamw_scalars(const AdamWArguments& args, const AdamWFactors& factors, float lr,
                                                  int64_t step) {
  AdamWScalars s{factors};
  s.decay = 1.0f - lr * static_cast<float>(args.weight_decay);
  s.sqrt_bias_correction2 = static_cast<float>(sqrt(1.0 - integer_power(args.beta2, step)));
  s.step_size = static_cast<float>(static_cast<double>(lr) / (1.0 - integer_power(args.beta1, step)));
  return s;
}

SPARSE_OPT_HOST_DEVICE void adamw_element(const AdamWScalars& s, float g, float& p, float& m, float& v) {
  m = m + (g - m) * s.one_minus_beta1;
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
  s.has_momentum = args.momentum_buffer != nullptr;
  s.first_step = step == 1;
  s.nesterov = args.nesterov;
  return s;
}

SPARSE_OPT_HOST_DEVICE void sgd_element(const SgdScalars& s, float g, float& p, float& b) {
  g = g + p * s.weight_decay;
  if (s.has_momentum) {
    b = s.first_step ? g : b * s.momentum + g * s.one_minus_dampening;
    g = s.nesterov ? g + b * s.momentum : b;
  }
  p = p - g * s.lr;
}

}  // namespace sparse_opt
