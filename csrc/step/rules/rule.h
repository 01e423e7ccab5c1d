// A rule is the arithmetic of one optimizer, written once for both devices: a header of this folder, which the build
// finds by its names (generate.py), and in it a struct with
//
//   kOp              the name of its op, which contains that of the file: indexed_adamw_ in adamw.h
//   kStates          the names of its states, compact buffers of the op's schema, kMaxStates at most
//   Options          its options; for_each(visit) calls visit(name in the schema, member) with double and bool members
//   CallScalars      what all elements of a call share: call_scalars(options), on the host
//   TensorScalars    what the elements of one tensor share: tensor_scalars(options, lr, step), once for each tensor
//   update(call, tensor, branch, g, p, states...)   one element
//
// and, if RuleDefaults does not fit, kOptionalStates, uses_states and branch. Everything is fp32, unless a scalar
// needs fp64, and each operation is rounded on its own, so that all backends give the same bits. That needs
// -ffp-contract=off (host) and --fmad=false (nvcc).
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>

#include "common/arguments.h"

namespace sparse_opt {

struct RuleDefaults {
  // Whether the states may be absent. If so, uses_states says whether a call with these options reads and writes them.
  static constexpr bool kOptionalStates = false;
  static bool uses_states(const auto&) { return true; }

  // A condition of update() that holds for all elements of a call or for none. It is an argument of update() because
  // the CPU's vector loops pass a constant.
  SPARSE_OPT_HOST_DEVICE static bool branch(const auto&) { return false; }
};

template <typename Rule>
constexpr int kStateCount = static_cast<int>(std::size(Rule::kStates));

// The gradient of one element, before the rule.
SPARSE_OPT_HOST_DEVICE float gradient_element(float g, const float* grad_scale, const float* clip_coef) {
  if (grad_scale != nullptr) g = g / *grad_scale;
  if (clip_coef != nullptr) g = g * *clip_coef;
  return g;
}

// Decoupled weight decay, Loshchilov and Hutter, https://arxiv.org/abs/1711.05101: the factor of the parameter.
SPARSE_OPT_HOST_DEVICE float decoupled_decay(float lr, double weight_decay) {
  return 1.0f - lr * static_cast<float>(weight_decay);
}

}  // namespace sparse_opt
