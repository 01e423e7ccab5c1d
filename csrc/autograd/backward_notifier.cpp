#include "backward_notifier.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "error_text.h"

namespace sparse_opt {

BackwardNotifier::BackwardNotifier(std::vector<int64_t> group_of, Ready ready, Ended ended)
    : group_of_(std::move(group_of)), ready_(std::move(ready)), ended_(std::move(ended)) {
  for (const int64_t group : group_of_) {
    sizes_.resize(std::max(sizes_.size(), static_cast<size_t>(group) + 1));
    ++sizes_[group];
  }
}

std::shared_ptr<BackwardNotifier> BackwardNotifier::create(const std::vector<at::Tensor>& params,
                                                           std::vector<int64_t> group_of, Ready ready, Ended ended) {
  SPARSE_OPT_CHECK(group_of.size() == params.size(), "group_of has ", group_of.size(), " elements, expected ",
                   params.size());
  const std::shared_ptr<BackwardNotifier> notifier(
      new BackwardNotifier(std::move(group_of), std::move(ready), std::move(ended)));
  for (size_t i = 0; i < params.size(); ++i) {
    NodePointer node = torch::autograd::impl::grad_accumulator(params[i]);
    SPARSE_OPT_CHECK(static_cast<bool>(node), "params[", i, "] does not require grad");
    node->add_post_hook(std::make_unique<Hook>(notifier, i));
    notifier->nodes_.push_back(std::move(node));
  }
  return notifier;
}

void BackwardNotifier::remove() {
  std::vector<NodePointer> nodes;  // released after the lock: other hooks on them may be any code
  const std::lock_guard lock(mutex_);
  nodes.swap(nodes_);
}

void BackwardNotifier::reached(size_t i) {
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

}  // namespace sparse_opt
