// Notifies when the gradients of groups of parameters are complete in a backward pass, so that the reduction of one
// group across ranks can start while the pass computes the others.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "error_text.h"

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

  // `ready(g)` is called when a backward pass has accumulated the gradients of all parameters of group g, and `ended()`
  // at the end of each pass that has reached any parameter, on the pass's thread. `group_of`: of each parameter. As in
  // DDP's reducer, the hooks are on the nodes that accumulate the gradients, which run once in a pass, also for
  // undefined gradients, and after the hooks of `register_post_accumulate_grad_hook`.
  BackwardNotifier(std::vector<int64_t> group_of, std::function<void(int64_t)> ready, std::function<void()> ended)
      : group_of_(std::move(group_of)), ready_(std::move(ready)), ended_(std::move(ended)) {
    for (const int64_t group : group_of_) {
      sizes_.resize(std::max(sizes_.size(), static_cast<size_t>(group) + 1));
      ++sizes_[group];
    }
  }

  void attach(const std::vector<at::Tensor>& params) {
    SPARSE_OPT_CHECK(group_of_.size() == params.size(), "group_of has ", group_of_.size(), " elements, expected ",
                     params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      NodePointer node = torch::autograd::impl::grad_accumulator(params[i]);
      SPARSE_OPT_CHECK(static_cast<bool>(node), "params[", i, "] does not require grad");
      node->add_post_hook(std::make_unique<Hook>(weak_from_this(), i));
      nodes_.push_back(std::move(node));
    }
  }

  // Afterwards the hooks do nothing. They stay on their nodes, because the engine may be calling them now.
  void remove() {
    std::vector<NodePointer> nodes;  // released after the lock: other hooks on them may be any code
    const std::lock_guard lock(mutex_);
    nodes.swap(nodes_);
  }

 private:
  // A std::shared_ptr or an intrusive one, by the version of torch.
  using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  void reached(size_t i) {
    bool complete = false;
    {
      const std::lock_guard lock(mutex_);
      if (nodes_.empty()) return;
      const int pass = torch::autograd::get_current_graph_task_id();
      if (pass != pass_) {  // a pass that raised never ended
        pass_ = pass;
        remaining_ = sizes_;
        torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
          if (const std::shared_ptr<BackwardNotifier> self = weak.lock()) self->ended_();
        });
      }
      complete = --remaining_[group_of_[i]] == 0;
    }
    if (complete) ready_(group_of_[i]);
  }

  const std::vector<int64_t> group_of_;
  std::vector<int64_t> sizes_;  // of each group
  const std::function<void(int64_t)> ready_;
  const std::function<void()> ended_;

  std::mutex mutex_;                // protects the following; not held during calls
  std::vector<NodePointer> nodes_;  // a parameter does not keep its node alive; empty after remove()
  std::vector<int64_t> remaining_;  // parameters of each group that the pass has not reached yet
  int pass_ = -1;
};

}  // namespace sparse_opt
