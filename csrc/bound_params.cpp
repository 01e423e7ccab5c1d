#include "bound_params.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "native.h"

namespace sparse_opt {
namespace {

// The registered op. The dispatcher wants the type of its kernels to the letter, which is the same for every device.
template <typename Signature>
auto native_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct AnyDevice;
using AdamW = decltype(indexed_adamw_<AnyDevice>);
using Sgd = decltype(indexed_sgd_<AnyDevice>);
using Gather = decltype(masked_grad_gather_<AnyDevice>);
using GatherPartly = void(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, bool,
                          const at::Tensor&, int64_t, const OptionalTensor&, int64_t, const OptionalTensor&);
using CountSteps = decltype(count_steps_<AnyDevice>);
using AddPartialSums = void(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef);

}  // namespace

BoundParams::BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
                         std::vector<int64_t> ends, int64_t run_length, std::optional<at::Tensor> index_bases)
    : params_(std::move(params)),
      indices_(std::move(indices)),
      starts_(std::move(starts)),
      ends_(std::move(ends)),
      run_length_(run_length),
      index_bases_(std::move(index_bases)),
      own_bases_(params_.size()),
      received_(params_.size()) {
  for (const at::Tensor& param : params_) numels_.push_back(param.numel());
  if (index_bases_.has_value()) {
    const int64_t frames = indices_.numel() / kIndexFrame + 1;
    for (size_t i = 0; i < params_.size(); ++i)
      own_bases_[i] = index_bases_->narrow(0, static_cast<int64_t>(i), frames);
  }
  if (!indices_.is_cuda()) return;
  int64_t partials = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    first_partial_.push_back(partials);
    partials += gather_blocks(starts_[i], ends_[i]);
  }
  partial_sums_ = at::zeros({partials}, indices_.options().dtype(at::kFloat));
}

bool BoundParams::has_grads() const {
  return std::any_of(params_.begin(), params_.end(), [](const at::Tensor& param) { return param.grad().defined(); });
}

// The positions were checked against the parameters as they were. A parameter whose data has been replaced by another
// size must not be written through them.
void BoundParams::check_numels() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    SPARSE_OPT_CHECK(params_[i].numel() == numels_[i], "params[", i, "] has ", params_[i].numel(),
                     " elements, but had ", numels_[i], " when its mask was bound");
  }
}

bool BoundParams::take_grads() {
  grads_.clear();
  grads_.reserve(params_.size());
  for (const at::Tensor& param : params_) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) {
      grads_.clear();
      return false;
    }
    grads_.push_back(grad.contiguous());
  }
  return true;
}

void BoundParams::gather_(int64_t i, const at::Tensor& grad, const at::Tensor& out, bool accumulate,
                          const at::Tensor& sum_sq, const OptionalTensor& found_inf) const {
  SPARSE_OPT_CHECK(grad.numel() == numels_.at(i), "the gradient of params[", i, "] has ", grad.numel(),
                   " elements, wanted ", numels_[i]);
  if (partial_sums_.defined()) {
    static const auto op = native_op<GatherPartly>("sparse_opt_native::gather_partly_");
    op.call(out, grad.contiguous(), indices_, starts_[i], ends_[i], accumulate, partial_sums_, first_partial_[i],
            found_inf, run_length_, own_bases_[i]);
    return;
  }
  static const auto op = native_op<Gather>("sparse_opt_native::masked_grad_gather_");
  op.call(out, grad.contiguous(), indices_, at::IntArrayRef(starts_[i]), at::IntArrayRef(ends_[i]), std::nullopt,
          accumulate, sum_sq.narrow(0, i, 1), found_inf, run_length_, own_bases_[i]);
}

void BoundParams::receive_into(const at::Tensor& out, const at::Tensor& sum_sq) {
  out_ = out;
  sum_sq_ = sum_sq;
}

bool BoundParams::receive(size_t i) {
  at::Tensor& grad = params_[i].mutable_grad();
  if (!receiving_ || !grad.defined() || grad.layout() != at::kStrided) return false;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  gather_(static_cast<int64_t>(i), std::exchange(grad, at::Tensor()), out_, received_[i], sum_sq_, std::nullopt);
  received_[i] = true;
  return true;
}

void BoundParams::sum_squares_(const at::Tensor& sum_sq) const {
  if (!partial_sums_.defined()) return;
  static const auto op = native_op<AddPartialSums>("sparse_opt_native::add_partial_sums_");
  op.call(sum_sq, partial_sums_, starts_, ends_);
}

OptionalTensors BoundParams::gradients_for(const OptionalTensor& grad) {
  if (grad.has_value()) return std::nullopt;
  return std::exchange(grads_, {});
}

void BoundParams::bump_versions() const {
  for (const at::Tensor& param : params_) {
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

void BoundParams::before_step(const at::Tensor& steps, const OptionalTensor& found_inf) const {
  check_numels();
  static const auto op = native_op<CountSteps>("sparse_opt_native::count_steps_");
  op.call(steps, found_inf);
}

void BoundParams::indexed_adamw_(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& lr,
                                 const at::Tensor& steps, const OptionalTensor& grad, const OptionalTensor& master,
                                 double beta1, double beta2, double eps, double weight_decay,
                                 const OptionalTensor& clip_coef, const OptionalTensor& grad_scale,
                                 const OptionalTensor& found_inf, bool stochastic_rounding, int64_t seed) {
  before_step(steps, found_inf);
  static const auto op = native_op<AdamW>("sparse_opt_native::indexed_adamw_");
  op.call(params_, indices_, starts_, ends_, exp_avg, exp_avg_sq, lr, steps, grad, gradients_for(grad), master, beta1,
          beta2, eps, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed, run_length_,
          index_bases_);
  bump_versions();
}

void BoundParams::indexed_sgd_(const OptionalTensor& momentum_buffer, const at::Tensor& lr, const at::Tensor& steps,
                               const OptionalTensor& grad, const OptionalTensor& master, double momentum,
                               double dampening, bool nesterov, double weight_decay, const OptionalTensor& clip_coef,
                               const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                               bool stochastic_rounding, int64_t seed) {
  before_step(steps, found_inf);
  static const auto op = native_op<Sgd>("sparse_opt_native::indexed_sgd_");
  op.call(params_, indices_, starts_, ends_, momentum_buffer, lr, steps, grad, gradients_for(grad), master, momentum,
          dampening, nesterov, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed, run_length_,
          index_bases_);
  bump_versions();
}

}  // namespace sparse_opt
