#include "bound_params.h"

#include <ATen/core/dispatch/Dispatcher.h>

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

}  // namespace

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

void BoundParams::gather_(int64_t i, const at::Tensor& out, bool accumulate, const at::Tensor& sum_sq,
                          const OptionalTensor& found_inf) const {
  static const auto op = native_op<Gather>("sparse_opt_native::masked_grad_gather_");
  const at::Tensor grad = params_.at(i).grad().contiguous();
  op.call(out, grad, indices_, at::IntArrayRef(starts_[i]), at::IntArrayRef(ends_[i]), std::nullopt, accumulate,
          sum_sq.narrow(0, i, 1), found_inf);
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

void BoundParams::indexed_adamw_(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& lr,
                                 const at::Tensor& steps, const OptionalTensor& grad, const OptionalTensor& master,
                                 double beta1, double beta2, double eps, double weight_decay,
                                 const OptionalTensor& clip_coef, const OptionalTensor& grad_scale,
                                 const OptionalTensor& found_inf, bool stochastic_rounding, int64_t seed) {
  static const auto op = native_op<AdamW>("sparse_opt_native::indexed_adamw_");
  op.call(params_, indices_, starts_, ends_, exp_avg, exp_avg_sq, lr, steps, grad, gradients_for(grad), master, beta1,
          beta2, eps, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed);
  bump_versions();
}

void BoundParams::indexed_sgd_(const OptionalTensor& momentum_buffer, const at::Tensor& lr, const at::Tensor& steps,
                               const OptionalTensor& grad, const OptionalTensor& master, double momentum,
                               double dampening, bool nesterov, double weight_decay, const OptionalTensor& clip_coef,
                               const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                               bool stochastic_rounding, int64_t seed) {
  static const auto op = native_op<Sgd>("sparse_opt_native::indexed_sgd_");
  op.call(params_, indices_, starts_, ends_, momentum_buffer, lr, steps, grad, gradients_for(grad), master, momentum,
          dampening, nesterov, weight_decay, clip_coef, grad_scale, found_inf, stochastic_rounding, seed);
  bump_versions();
}

}  // namespace sparse_opt
