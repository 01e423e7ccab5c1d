// A list of parameters and their segments, turned into C++ once. A step of a model then hands over one object where it
// would convert hundreds of tensors and integers, and finds the dense gradients itself.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

namespace sparse_opt {

class BoundParams {
 public:
  BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
              std::vector<int64_t> ends, int64_t run_length, std::optional<at::Tensor> index_bases);

  // Whether any parameter has a gradient.
  bool has_grads() const;

  // Hold every parameter's gradient, made contiguous, for the next step. False, and none held, if one has none.
  bool take_grads();

  // masked_grad_gather_ of parameter i's gradient into its slots of `out`, [nnz]. The elements of `sum_sq`, [n], of the
  // parameters gathered stand when sum_squares_ was called: a GPU adds up those of all parameters in one launch.
  void gather_(int64_t i, const at::Tensor& grad, const at::Tensor& out, bool accumulate, const at::Tensor& sum_sq,
               const std::optional<at::Tensor>& found_inf) const;
  void sum_squares_(const at::Tensor& sum_sq) const;

  // What the hooks of gradient_hook.h do while they are told to: gather_ the gradient that parameter i has into the
  // buffers named here, and let it go. False, and nothing done, if they are told not to, or it has none or one that is
  // not strided.
  void receive_into(const at::Tensor& out, const at::Tensor& sum_sq);
  void set_receiving(bool receiving) { receiving_ = receiving; }
  bool receive(size_t i);

  // Of each parameter: whether a gradient is in the buffer, for the next one to be added to.
  const std::vector<bool>& received() const { return received_; }
  void set_received(std::vector<bool> received) { received_ = std::move(received); }
  void mark_received(size_t i) { received_.at(i) = true; }
  const at::Tensor& param(size_t i) const { return params_.at(i); }

  // The ops of these names on the list, with `grad` or else the gradients held, which are let go. `steps` are those
  // done before, and counted up. Bump the parameters' versions: kernels write through pointers, which autograd does not
  // see.
  void indexed_adamw_(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& lr,
                      const at::Tensor& steps, const std::optional<at::Tensor>& grad,
                      const std::optional<at::Tensor>& master, double beta1, double beta2, double eps,
                      double weight_decay, const std::optional<at::Tensor>& clip_coef,
                      const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                      bool stochastic_rounding, int64_t seed);
  void indexed_sgd_(const std::optional<at::Tensor>& momentum_buffer, const at::Tensor& lr, const at::Tensor& steps,
                    const std::optional<at::Tensor>& grad, const std::optional<at::Tensor>& master, double momentum,
                    double dampening, bool nesterov, double weight_decay, const std::optional<at::Tensor>& clip_coef,
                    const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
                    bool stochastic_rounding, int64_t seed);

 private:
  std::optional<std::vector<at::Tensor>> gradients_for(const std::optional<at::Tensor>& grad);
  void check_numels() const;
  void bump_versions() const;
  void before_step(const at::Tensor& steps, const std::optional<at::Tensor>& found_inf) const;

  std::vector<at::Tensor> params_, grads_;
  at::Tensor indices_;  // [nnz / run_length]
  std::vector<int64_t> starts_, ends_, numels_;
  int64_t run_length_;
  std::optional<at::Tensor> index_bases_;
  std::vector<std::optional<at::Tensor>> own_bases_;  // of each parameter, for a call with it alone
  at::Tensor partial_sums_;                           // on a GPU: fp32, what the gathers left for sum_squares_
  std::vector<int64_t> first_partial_;                // of each parameter
  at::Tensor out_, sum_sq_;                           // of receive
  std::vector<bool> received_;
  bool receiving_ = false;
};

}  // namespace sparse_opt
