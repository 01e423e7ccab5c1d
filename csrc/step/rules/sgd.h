// SGD with momentum, dampening and decay added to the gradient, as torch.optim.SGD.
#pragma once

#include "rule.h"

namespace sparse_opt {

struct Sgd : RuleDefaults {
  static constexpr const char* kOp = "indexed_sgd_";
  static constexpr const char* kStates[] = {"momentum_buffer"};
  static constexpr bool kOptionalStates = true;

  struct Options {
    double momentum, dampening, weight_decay;
    bool nesterov;

    void for_each(auto visit) {
      visit("momentum", momentum);
      visit("dampening", dampening);
      visit("nesterov", nesterov);
      visit("weight_decay", weight_decay);
    }
  };

  struct CallScalars {
    float momentum, one_minus_dampening, weight_decay;
    bool has_momentum, nesterov;
  };

  struct alignas(8) TensorScalars {
    float lr;
    bool first_step;
  };

  static bool uses_states(const Options& options) { return options.momentum != 0.0; }

  static CallScalars call_scalars(const Options& options) {
    return {static_cast<float>(options.momentum), static_cast<float>(1.0 - options.dampening),
            static_cast<float>(options.weight_decay), uses_states(options), options.nesterov};
  }

  SPARSE_OPT_HOST_DEVICE static TensorScalars tensor_scalars(const Options&, float lr, int64_t step) {
    return {lr, step == 1};
  }

  SPARSE_OPT_HOST_DEVICE static void update(const CallScalars& call, const TensorScalars& tensor, bool, float g,
                                            float& p, float& b) {
    if (call.weight_decay != 0.0f) g = g + p * call.weight_decay;
    if (call.has_momentum) {
      b = tensor.first_step ? g : b * call.momentum + g * call.one_minus_dampening;
      g = call.nesterov ? g + b * call.momentum : b;
    }
    p = p - g * tensor.lr;
  }
};

}  // namespace sparse_opt
