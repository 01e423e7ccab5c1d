#include "bound_params.h"

#include <algorithm>
#include <deque>
#include <string_view>

#include "calls.h"
#include "error_text.h"
#include "native_calls.h"
#include "step_op.h"

namespace sparse_opt {
namespace {

std::vector<int64_t> numels_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numels;
  for (const at::Tensor& tensor : tensors) numels.push_back(tensor.numel());
  return numels;
}

// Reads the inputs of a step from the arguments of its op, and holds the lists.
class Reader {
 public:
  Reader(const std::vector<c10::Argument>& schema, const torch::jit::Stack& stack) : schema_(schema), stack_(stack) {}

  void operator()(const char* name, auto& input) {
    TORCH_INTERNAL_ASSERT(next_ < stack_.size() && schema_[next_].name() == name, "the schema has no argument ", name,
                          " at ", next_);
    read(stack_[next_++], input);
  }

 private:
  void read(const c10::IValue& value, TensorView& view) { view = view_of(value.toTensor()); }
  void read(const c10::IValue& value, TensorList& views) {
    std::vector<TensorView>& held = lists_.emplace_back();
    const c10::ArrayRef<c10::IValue> tensors = value.toListRef();
    held.reserve(tensors.size());
    for (const c10::IValue& tensor : tensors) held.push_back(view_of(tensor.toTensor()));
    views = held;
  }
  void read(const c10::IValue& value, Ints& numbers) { numbers = numbers_.emplace_back(value.toIntVector()); }
  void read(const c10::IValue& value, int64_t& number) { number = value.toInt(); }
  void read(const c10::IValue& value, double& number) { number = value.toDouble(); }
  void read(const c10::IValue& value, bool& flag) { flag = value.toBool(); }
  template <typename T>
  void read(const c10::IValue& value, std::optional<T>& input) {
    input.reset();
    if (!value.isNone()) read(value, input.emplace());
  }

  const std::vector<c10::Argument>& schema_;
  const torch::jit::Stack& stack_;
  size_t next_ = 0;
  std::deque<std::vector<TensorView>> lists_;
  std::deque<std::vector<int64_t>> numbers_;
};

template <typename Rule>
void step_by(int number, const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  Reader read(schema.arguments(), arguments);
  StepInputs<Rule> inputs;
  inputs.for_each(read);
  const StepCall<Rule> call(inputs);
  if (inputs.check_only) return;
  const Device device = inputs.indices.device;
  kernels_for(device).step[number](call.args, &inputs.options, device.index);
}

void step_directly(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  RECORD_FUNCTION(schema.name(), c10::ArrayRef<const c10::IValue>());
  std::string_view name = schema.name();
  name.remove_prefix(name.rfind(':') + 1);
#define SPARSE_OPT_STEP(Rule) \
  if (name == Rule::kOp) return step_by<Rule>(k##Rule, schema, arguments);
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_STEP)
#undef SPARSE_OPT_STEP
  TORCH_INTERNAL_ASSERT(false, "no rule has the op ", name);
}

}  // namespace

BoundParams::BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
                         std::vector<int64_t> ends, int64_t run_length, std::optional<at::Tensor> index_bases)
    : params(std::move(params)),
      indices(std::move(indices)),
      starts(std::move(starts)),
      ends(std::move(ends)),
      run_length(run_length),
      index_bases(std::move(index_bases)),
      numels(numels_of(this->params)),
      bound_{{"params", this->params}, {"indices", this->indices},       {"starts", this->starts},
             {"ends", this->ends},     {"run_length", this->run_length}, {"index_bases", this->index_bases}} {}

bool BoundParams::has_grads() const {
  return std::any_of(params.begin(), params.end(), [](const at::Tensor& param) { return param.grad().defined(); });
}

// The indices were checked against the sizes at binding: they must not be used if a parameter's data was replaced by a
// tensor of another size.
void BoundParams::check_numels() const {
  for (size_t i = 0; i < params.size(); ++i) {
    SPARSE_OPT_CHECK(params[i].numel() == numels[i], "params[", i, "] has ", params[i].numel(), " elements, but had ",
                     numels[i], " when its mask was bound");
  }
}

bool BoundParams::take_grads() {
  c10::List<at::Tensor> grads;
  grads.reserve(params.size());
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.sizes() != param.sizes()) {
      grads.clear();
      break;
    }
    grads.push_back(grad.contiguous());
  }
  const bool taken = grads.size() == params.size();
  c10::IValue previous;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  previous = std::exchange(grads_, taken ? c10::IValue(std::move(grads)) : c10::IValue());
  return taken;
}

c10::IValue BoundParams::held_grads(bool keep) {
  const std::lock_guard lock(mutex_);
  return keep ? grads_ : std::exchange(grads_, c10::IValue());
}

void BoundParams::bump_versions() const {
  for (const at::Tensor& param : params) {
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

void BoundParams::step(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  check_numels();
  const auto argument = [&](const char* name) -> c10::IValue& {
    return arguments[op.schema().argumentIndexWithName(name).value()];
  };
  const bool check_only = argument("check_only").toBool();  // unseen by dispatch modes
  for (const auto& [name, value] : bound_) argument(name) = value;
  if (argument("grad").isNone() && argument("dense_grads").isNone()) argument("dense_grads") = held_grads(check_only);
  if (!check_only && c10::impl::dispatch_mode_enabled()) {
    op.callBoxed(arguments);
  } else {
    step_directly(op.schema(), arguments);
  }
  if (!check_only) bump_versions();
}

void BoundParams::swap(const at::Tensor& compact) const {
  check_numels();
  const auto direct = [&] {
    const std::vector<TensorView> list = views_of(params);
    const MoveCall call(list, "compact", view_of(compact), view_of(indices), starts, ends, run_length,
                        view_of(index_bases));
    kernels_for(view_of(indices).device).swap(call.args, indices.device().index());
  };
  call_native("sparse_opt_native::indexed_swap_", direct, params, compact, indices, starts, ends, run_length,
              index_bases);
  bump_versions();
}

void BoundParams::replace(const at::Tensor& before, const at::Tensor& after) const {
  check_numels();
  const auto direct = [&] {
    const std::vector<TensorView> list = views_of(params);
    const ReplaceCall call(list, view_of(before), view_of(after), view_of(indices), starts, ends, run_length,
                           view_of(index_bases));
    kernels_for(view_of(indices).device).replace(call.args, indices.device().index());
  };
  call_native("sparse_opt_native::indexed_replace_", direct, params, before, after, indices, starts, ends, run_length,
              index_bases);
  bump_versions();
}

void BoundParams::gather(const at::Tensor& out, const std::optional<std::vector<at::Tensor>>& dense,
                         const std::optional<at::Tensor>& scale, bool accumulate,
                         const std::optional<at::Tensor>& sum_sq, const std::optional<at::Tensor>& found_inf,
                         std::optional<size_t> only) const {
  const std::vector<at::Tensor>& list = dense.has_value() ? *dense : params;
  const size_t first = only.value_or(0), n = only.has_value() ? 1 : params.size();
  SPARSE_OPT_CHECK(list.size() == n, "dense holds ", list.size(), " tensors, expected ", n);
  for (size_t i = 0; i < n; ++i) {
    SPARSE_OPT_CHECK(list[i].numel() == numels[first + i], "dense[", i, "] has ", list[i].numel(),
                     " elements, expected ", numels[first + i]);
  }
  const at::IntArrayRef its_starts = at::IntArrayRef(starts).slice(first, n);
  const at::IntArrayRef its_ends = at::IntArrayRef(ends).slice(first, n);
  std::optional<at::Tensor> bases = index_bases;
  if (only.has_value() && bases.has_value())
    bases = bases->narrow(0, static_cast<int64_t>(first), indices.numel() / kIndexFrame + 1);
  const auto direct = [&] {
    const std::vector<TensorView> views = views_of(list);
    const GatherCall call(view_of(out), views, view_of(indices), its_starts, its_ends, view_of(scale), accumulate,
                          view_of(sum_sq), view_of(found_inf), run_length, view_of(bases));
    kernels_for(view_of(indices).device).gather(call.args, indices.device().index());
  };
  call_native("sparse_opt_native::masked_grad_gather_", direct, out, list, indices, its_starts, its_ends, scale,
              accumulate, sum_sq, found_inf, run_length, bases);
}

}  // namespace sparse_opt
