// A step op, written once for all optimizers and devices: find the arguments by their names in the schema, which
// sparse_opt/ops defines, check them, launch.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "kernels/rules/rules.h"

namespace sparse_opt {

// The arguments of a boxed call. Reading them in the order of the schema takes one comparison of names each.
class NamedArguments {
 public:
  NamedArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : arguments_(schema.arguments()), values_(&stack[stack.size() - arguments_.size()]) {}

  const c10::IValue& operator[](const char* name) {
    for (size_t tried = 0; tried < arguments_.size(); ++tried) {
      const size_t i = next_++;
      if (next_ == arguments_.size()) next_ = 0;
      if (arguments_[i].name() == name) return values_[i];
    }
    TORCH_INTERNAL_ASSERT(false, "the schema has no argument ", name);
  }

  std::optional<at::Tensor> optional_tensor(const char* name) { return (*this)[name].toOptional<at::Tensor>(); }

  void read(const char* name, double& number) { number = (*this)[name].toDouble(); }
  void read(const char* name, bool& flag) { flag = (*this)[name].toBool(); }

 private:
  const std::vector<c10::Argument>& arguments_;
  const c10::IValue* values_;
  size_t next_ = 0;
};

// The checked arguments of a step. Holds the lists that `args` points to.
template <typename Rule>
struct StepCall {
  static_assert(kStateCount<Rule> <= kMaxStates);

  const BoxedList param_list;
  const at::Tensor& indices;
  std::vector<int64_t> starts, ends;
  std::vector<void*> params, dense_grads;
  StepArguments args;
  typename Rule::Options options;

  explicit StepCall(NamedArguments& named)
      : param_list(named["params"].toListRef()),
        indices(named["indices"].toTensor()),
        starts(named["starts"].toIntVector()),
        ends(named["ends"].toIntVector()) {
    const at::Device device = indices.device();
    const int64_t run_length = named["run_length"].toInt(), nnz = checked_slots(indices, run_length);
    const auto count = static_cast<int64_t>(param_list.size());
    params = list_data("params", param_list, device);
    args.segments = checked_segments("params", param_list, params, indices, starts, ends, run_length,
                                     named.optional_tensor("index_bases"));
    if (count > 0) args.param_dtype = dtype_of("params[0]", tensor_of(param_list[0]));
    options.for_each([&](const char* name, auto& option) { named.read(name, option); });
    read_states(named, nnz);
    args.lr = float_data("lr", named["lr"].toTensor(), 1, device);
    args.steps = float_data("steps", named["steps"].toTensor(), count, device);
    read_gradient(named, nnz);
    args.master = optional_float_data("master", named.optional_tensor("master"), nnz, device);
    args.clip_coef = optional_float_data("clip_coef", named.optional_tensor("clip_coef"), 1, device);
    args.grad_scale = optional_float_data("grad_scale", named.optional_tensor("grad_scale"), 1, device);
    args.found_inf = optional_float_data("found_inf", named.optional_tensor("found_inf"), 1, device);
    args.stochastic_rounding = named["stochastic_rounding"].toBool();
    args.seed = static_cast<uint64_t>(named["seed"].toInt());
    args.count_steps = named["count_steps"].toBool();
  }

 private:
  void read_states(NamedArguments& named, int64_t nnz) {
    const bool used = Rule::uses_states(options);
    std::optional<at::ScalarType> dtype;
    for (int i = 0; i < kStateCount<Rule>; ++i) {
      const char* name = Rule::kStates[i];
      const auto state = named.optional_tensor(name);
      SPARSE_OPT_CHECK(state.has_value() || !used, name, " is None, expected a tensor");
      if (!state.has_value()) continue;
      check_flat(name, *state, nnz, indices.device());
      args.state_dtype = dtype_of(name, *state);
      SPARSE_OPT_CHECK(args.state_dtype != DType::kFloat16, name, " is Half, expected float32 or bfloat16");
      if (dtype.has_value()) check_dtype(name, *state, *dtype);
      dtype = state->scalar_type();
      if (used) args.states[i] = state->data_ptr();
    }
  }

  void read_gradient(NamedArguments& named, int64_t nnz) {
    const auto grad = named.optional_tensor("grad");
    const c10::IValue& dense = named["dense_grads"];
    SPARSE_OPT_CHECK(grad.has_value() == dense.isNone(), "expected exactly one of grad and dense_grads, got ",
                     grad.has_value() ? "both" : "neither");
    if (grad.has_value()) {
      check_flat("grad", *grad, nnz, indices.device());
      args.grad = grad->data_ptr();
      args.grad_dtype = dtype_of("grad", *grad);
      return;
    }
    const BoxedList dense_grad_list = dense.toListRef();
    check_same_sizes("dense_grads", dense_grad_list, "params", param_list);
    dense_grads = list_data("dense_grads", dense_grad_list, indices.device());
    args.dense_grads = dense_grads.data();
    if (!dense_grad_list.empty()) args.grad_dtype = dtype_of("dense_grads[0]", tensor_of(dense_grad_list[0]));
  }
};

// The kernel of Rule::kOp. `Device` supplies Guard(at::Device), alive during the launch, and step<Rule>(args, options).
template <typename Rule, typename Device>
void run_step(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  NamedArguments named(op.schema(), *stack);
  const StepCall<Rule> call(named);
  if (!named["check_only"].toBool()) {
    const typename Device::Guard guard(call.indices.device());
    Device::template step<Rule>(call.args, call.options);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
}

template <typename Device, typename Library>
void implement_steps(Library& m) {
#define SPARSE_OPT_IMPLEMENT(Rule) \
  m.impl(Rule::kOp, torch::CppFunction::makeFromBoxedFunction<&run_step<Rule, Device>>());
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_IMPLEMENT)
#undef SPARSE_OPT_IMPLEMENT
}

}  // namespace sparse_opt
