// A step op, written once for all optimizers and devices: its arguments in the order of the schema, which
// sparse_opt/ops/schemas.py defines, and their checks.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "generated/rules.h"
#include "step/step.h"

namespace sparse_opt {

// The arguments of a step op. Rule::Options lists its options in the order of the schema too.
template <typename Rule>
struct StepInputs {
  static_assert(kStateCount<Rule> <= kMaxStates);

  TensorList params;
  TensorView indices;
  Ints starts, ends;
  std::conditional_t<Rule::kOptionalStates, OptionalTensor, TensorView> states[kStateCount<Rule>];
  TensorView lr, steps;
  OptionalTensor grad;
  std::optional<TensorList> dense_grads;
  OptionalTensor master, weights;
  bool params_hold_master;
  typename Rule::Options options;
  OptionalTensor clip_coef, grad_scale, found_inf;
  bool stochastic_rounding;
  int64_t seed, run_length;
  OptionalTensor index_bases;
  bool count_steps, check_only;

  // Calls visit(name, member) for each argument, in the order of the schema. tests/ops/test_schemas.py compares the
  // two.
  void for_each(auto&& visit) {
    visit("params", params);
    visit("indices", indices);
    visit("starts", starts);
    visit("ends", ends);
    for (int i = 0; i < kStateCount<Rule>; ++i) visit(Rule::kStates[i], states[i]);
    visit("lr", lr);
    visit("steps", steps);
    visit("grad", grad);
    visit("dense_grads", dense_grads);
    visit("master", master);
    visit("weights", weights);
    visit("params_hold_master", params_hold_master);
    options.for_each([&](const char* name, auto& option) { visit(name, option); });
    visit("clip_coef", clip_coef);
    visit("grad_scale", grad_scale);
    visit("found_inf", found_inf);
    visit("stochastic_rounding", stochastic_rounding);
    visit("seed", seed);
    visit("run_length", run_length);
    visit("index_bases", index_bases);
    visit("count_steps", count_steps);
    visit("check_only", check_only);
  }
};

// The checked arguments of a step. Holds the lists that `args` points to; `inputs` must outlive it.
template <typename Rule>
struct StepCall {
  std::vector<void*> params, dense_grads;
  StepArguments args;

  explicit StepCall(const StepInputs<Rule>& in) {
    const Device device = in.indices.device;
    const int64_t nnz = checked_slots(in.indices, in.run_length);
    const auto count = static_cast<int64_t>(in.params.size());
    params = list_data("params", in.params, device);
    args.segments =
        checked_segments("params", in.params, params, in.indices, in.starts, in.ends, in.run_length, in.index_bases);
    if (count > 0) args.param_dtype = dtype_of("params[0]", in.params[0]);
    set_states(in, nnz);
    args.lr = float_data("lr", in.lr, 1, device);
    args.steps = float_data("steps", in.steps, count, device);
    set_gradient(in, nnz);
    args.master = optional_float_data("master", in.master, nnz, device);
    set_weights(in, nnz);
    args.clip_coef = optional_float_data("clip_coef", in.clip_coef, 1, device);
    args.grad_scale = optional_float_data("grad_scale", in.grad_scale, 1, device);
    args.found_inf = optional_float_data("found_inf", in.found_inf, 1, device);
    args.stochastic_rounding = in.stochastic_rounding;
    args.seed = static_cast<uint64_t>(in.seed);
    args.count_steps = in.count_steps;
  }

 private:
  void set_states(const StepInputs<Rule>& in, int64_t nnz) {
    const bool used = Rule::uses_states(in.options);
    std::optional<ScalarType> dtype;
    for (int i = 0; i < kStateCount<Rule>; ++i) {
      const char* name = Rule::kStates[i];
      const OptionalTensor state = in.states[i];
      SPARSE_OPT_CHECK(state.has_value() || !used, name, " is None, expected a tensor");
      if (!state.has_value()) continue;
      check_flat(name, *state, nnz, in.indices.device);
      args.state_dtype = dtype_of(name, *state);
      SPARSE_OPT_CHECK(args.state_dtype != DType::kFloat16, name, " is Half, expected float32 or bfloat16");
      if (dtype.has_value()) check_dtype(name, *state, *dtype);
      dtype = state->dtype;
      if (used) args.states[i] = state->data;
    }
  }

  void set_weights(const StepInputs<Rule>& in, int64_t nnz) {
    SPARSE_OPT_CHECK(!in.params_hold_master || in.master.has_value(), "params_hold_master is True, but master is None");
    args.params_hold_master = in.params_hold_master;
    if (!in.weights.has_value()) return;
    SPARSE_OPT_CHECK(!in.master.has_value(), "expected at most one of master and weights, got both");
    check_flat("weights", *in.weights, nnz, in.indices.device);
    if (!in.params.empty()) check_dtype("weights", *in.weights, in.params[0].dtype);
    args.weights = in.weights->data;
  }

  void set_gradient(const StepInputs<Rule>& in, int64_t nnz) {
    SPARSE_OPT_CHECK(in.grad.has_value() != in.dense_grads.has_value(),
                     "expected exactly one of grad and dense_grads, got ", in.grad.has_value() ? "both" : "neither");
    if (in.grad.has_value()) {
      check_flat("grad", *in.grad, nnz, in.indices.device);
      args.grad = in.grad->data;
      args.grad_dtype = dtype_of("grad", *in.grad);
      return;
    }
    check_same_sizes("dense_grads", *in.dense_grads, "params", in.params);
    dense_grads = list_data("dense_grads", *in.dense_grads, in.indices.device);
    args.dense_grads = dense_grads.data();
    if (!in.dense_grads->empty()) args.grad_dtype = dtype_of("dense_grads[0]", (*in.dense_grads)[0]);
  }
};

}  // namespace sparse_opt
