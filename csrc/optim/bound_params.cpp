#include "bound_params.h"

#include <algorithm>

#include "native_op.h"

namespace sparse_opt {
namespace {

using AdamW = decltype(indexed_adamw_<AnyDevice>);
using Sgd = decltype(indexed_sgd_<AnyDevice>);

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
      last_pass_(params_.size(), Pass::kNone),
      received_(params_.size()),
      came_by_tiles_(params_.size()),
      waiting_tiles_{current_stream(indices_.device())},
      waiting_grads_{current_stream(indices_.device())},
      last_stream_(current_stream(indices_.device())) {
  for (const at::Tensor& param : params_) numels_.push_back(param.numel());
  if (index_bases_.has_value()) {
    const int64_t frames = indices_.numel() / kIndexFrame + 1;
    for (size_t i = 0; i < params_.size(); ++i)
      own_bases_[i] = index_bases_->narrow(0, static_cast<int64_t>(i), frames);
  }
  lay_out_partial_sums();
  set_waiting_grads(enough_grad_bytes());
}

// The buffers' memory is of streams that may not have waited for a gather, where a backward pass raised.
BoundParams::~BoundParams() {
  take_waiting_grads();
  try {
    finish_gathers();
  } catch (const c10::Error&) {  // of an earlier kernel: whoever waits for the device is told
  }
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
  std::vector<at::Tensor> grads;
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
  const std::lock_guard lock(mutex_);
  grads_.swap(grads);  // those held before are freed once the lock is released
  return taken;
}

OptionalTensors BoundParams::gradients_for(const OptionalTensor& grad, bool keep) {
  if (grad.has_value()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return keep ? grads_ : std::exchange(grads_, {});
}

void BoundParams::bump_versions() const {
  for (const at::Tensor& param : params_) {
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

void BoundParams::indexed_adamw_(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& lr,
                                 const at::Tensor& steps, const OptionalTensor& grad, const OptionalTensor& master,
                                 double beta1, double beta2, double eps, double weight_decay,
                                 const OptionalTensor& clip_coef, const OptionalTensor& grad_scale,
                                 const OptionalTensor& found_inf, bool stochastic_rounding, int64_t seed,
                                 bool check_only) {
  check_numels();
  OptionalTensors dense_grads = gradients_for(grad, check_only);
  if (check_only) {
    const AdamWCall checked(params_, indices_, starts_, ends_, exp_avg, exp_avg_sq, lr, steps, grad, dense_grads,
                            master, beta1, beta2, eps, weight_decay, clip_coef, grad_scale, found_inf,
                            stochastic_rounding, seed, run_length_, index_bases_);
    return;
  }
  static const auto op = native_op<AdamW>("sparse_opt_native::counting_adamw_");
  op.call(params_, indices_, starts_, ends_, exp_avg, exp_avg_sq, lr, steps, grad, std::move(dense_grads), master,
          beta1, beta2, eps, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed, run_length_,
          index_bases_);
  bump_versions();
}

void BoundParams::indexed_sgd_(const OptionalTensor& momentum_buffer, const at::Tensor& lr, const at::Tensor& steps,
                               const OptionalTensor& grad, const OptionalTensor& master, double momentum,
                               double dampening, bool nesterov, double weight_decay, const OptionalTensor& clip_coef,
                               const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                               bool stochastic_rounding, int64_t seed, bool check_only) {
  check_numels();
  OptionalTensors dense_grads = gradients_for(grad, check_only);
  if (check_only) {
    const SgdCall checked(params_, indices_, starts_, ends_, momentum_buffer, lr, steps, grad, dense_grads, master,
                          momentum, dampening, nesterov, weight_decay, clip_coef, grad_scale, found_inf,
                          stochastic_rounding, seed, run_length_, index_bases_);
    return;
  }
  static const auto op = native_op<Sgd>("sparse_opt_native::counting_sgd_");
  op.call(params_, indices_, starts_, ends_, momentum_buffer, lr, steps, grad, std::move(dense_grads), master, momentum,
          dampening, nesterov, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed, run_length_,
          index_bases_);
  bump_versions();
}

}  // namespace sparse_opt
