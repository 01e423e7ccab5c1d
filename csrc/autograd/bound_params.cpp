#include "bound_params.h"

#include <algorithm>

#include "direct_ops.h"
#include "error_text.h"

namespace sparse_opt {

BoundParams::BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
                         std::vector<int64_t> ends, int64_t run_length, std::optional<at::Tensor> index_bases)
    : params_(std::move(params)),
      indices_(std::move(indices)),
      starts_(std::move(starts)),
      ends_(std::move(ends)),
      run_length_(run_length),
      index_bases_(std::move(index_bases)),
      bound_{{"params", params_}, {"indices", indices_},       {"starts", starts_},
             {"ends", ends_},     {"run_length", run_length_}, {"index_bases", index_bases_}} {
  for (const at::Tensor& param : params_) numels_.push_back(param.numel());
}

bool BoundParams::has_grads() const {
  return std::any_of(params_.begin(), params_.end(), [](const at::Tensor& param) { return param.grad().defined(); });
}

// The indices were checked against the sizes at binding: they must not be used if a parameter's data was replaced by a
// tensor of another size.
void BoundParams::check_numels() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    SPARSE_OPT_CHECK(params_[i].numel() == numels_[i], "params[", i, "] has ", params_[i].numel(),
                     " elements, but had ", numels_[i], " when its mask was bound");
  }
}

bool BoundParams::take_grads() {
  c10::List<at::Tensor> grads;
  grads.reserve(params_.size());
  for (const at::Tensor& param : params_) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.sizes() != param.sizes()) {
      grads.clear();
      break;
    }
    grads.push_back(grad.contiguous());
  }
  const bool taken = grads.size() == params_.size();
  c10::IValue previous;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  previous = std::exchange(grads_, taken ? c10::IValue(std::move(grads)) : c10::IValue());
  return taken;
}

void BoundParams::release_grads() {
  held_grads(false);
}

c10::IValue BoundParams::held_grads(bool keep) {
  const std::lock_guard lock(mutex_);
  return keep ? grads_ : std::exchange(grads_, c10::IValue());
}

void BoundParams::bump_versions() const {
  for (const at::Tensor& param : params_) {
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

void BoundParams::step(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  check_numels();
  const auto argument = [&](const char* name) -> c10::IValue& {
    return arguments[op.schema().argumentIndexWithName(name).value()];
  };
  const bool check_only = argument("check_only").toBool();
  for (const auto& [name, value] : bound_) argument(name) = value;
  if (argument("grad").isNone() && argument("dense_grads").isNone()) argument("dense_grads") = held_grads(check_only);
  direct::step(op, std::move(arguments));
  if (!check_only) bump_versions();
}

void BoundParams::swap(const at::Tensor& compact) const {
  check_numels();
  direct::indexed_swap_(params_, compact, indices_, starts_, ends_, run_length_, index_bases_);
  bump_versions();
}

void BoundParams::replace(const at::Tensor& before, const at::Tensor& after) const {
  check_numels();
  direct::indexed_replace_(params_, before, after, indices_, starts_, ends_, run_length_, index_bases_);
  bump_versions();
}

void BoundParams::gather(const at::Tensor& out, const std::optional<std::vector<at::Tensor>>& dense,
                         const std::optional<at::Tensor>& scale, bool accumulate,
                         const std::optional<at::Tensor>& sum_sq, const std::optional<at::Tensor>& found_inf) const {
  const std::vector<at::Tensor>& list = dense.has_value() ? *dense : params_;
  SPARSE_OPT_CHECK(list.size() == numels_.size(), "dense holds ", list.size(), " tensors, expected ", numels_.size());
  for (size_t i = 0; i < list.size(); ++i) {
    SPARSE_OPT_CHECK(list[i].numel() == numels_[i], "dense[", i, "] has ", list[i].numel(), " elements, expected ",
                     numels_[i]);
  }
  direct::masked_grad_gather_(out, list, indices_, starts_, ends_, scale, accumulate, sum_sq, found_inf, run_length_,
                              index_bases_);
}

}  // namespace sparse_opt
