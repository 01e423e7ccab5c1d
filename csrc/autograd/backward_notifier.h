// Notifies when the gradients of groups of parameters are complete in a backward pass, so that the reduction of one
// group across ranks can start while the pass computes the others.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace sparse_opt {

class BackwardNotifier : public std::enable_shared_from_this<BackwardNotifier> {
 public:
  // A hook on the node of parameter i. It does not use the gradient.
  class Hook : public torch::autograd::FunctionPostHook {
   public:
    Hook(std::weak_ptr<BackwardNotifier> notifier, size_t i) : notifier_(std::move(notifier)), i_(i) {}
    std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>&) override {
      if (const std::shared_ptr<BackwardNotifier> notifier = notifier_.lock()) notifier->reached(i_);
      return outputs;
    }

   private:
    std::weak_ptr<BackwardNotifier> notifier_;
    size_t i_;
  };

  using Ready = std::function<void(int64_t)>;
  using Ended = std::function<void()>;

  // `ready(g)` is called when a backward pass has accumulated the gradients of all parameters of group g, and `ended()`
  // at the end of each pass that has reached any parameter, on the pass's thread. `group_of`: of each parameter. As in
  // DDP's reducer, the hooks are on the nodes that accumulate the gradients, which run once in a pass, also for
  // undefined gradients, and after the hooks of `register_post_accumulate_grad_hook`.
  static std::shared_ptr<BackwardNotifier> create(const std::vector<at::Tensor>& params, std::vector<int64_t> group_of,
                                                  Ready ready, Ended ended);
  // Afterwards the hooks do nothing. They stay on their nodes, because the engine may be calling them now.
  void remove();

 private:
  // A std::shared_ptr or an intrusive one, by the version of torch.
  using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  BackwardNotifier(std::vector<int64_t> group_of, Ready ready, Ended ended);
  void reached(size_t i);

  const std::vector<int64_t> group_of_;
  std::vector<int64_t> sizes_;  // of each group
  const Ready ready_;
  const Ended ended_;

  std::mutex mutex_;                // protects the following; not held during calls
  std::vector<NodePointer> nodes_;  // a parameter does not keep its node alive; empty after remove()
  std::vector<int64_t> remaining_;  // parameters of each group that the pass has not reached yet
  int pass_ = -1;
};

}  // namespace sparse_opt
