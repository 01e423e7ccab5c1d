// Gives a gradient to the GradientBuffer as soon as autograd has accumulated it, without Python: a backward pass of a
// model calls hundreds of hooks, and its thread would have to take the interpreter's lock for each.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "error_text.h"
#include "gradient_buffer.h"

namespace sparse_opt {

// A tensor has one post-accumulate hook; Python's calls the functions in a dictionary. This hook wraps it, and replaces
// the optimizer's function if that is the only one. It calls the dictionary if other code has added functions, whose
// order counts, if the buffer does not accept the gradient, or if the optimizer no longer exists.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::unique_ptr<PostAccumulateGradHook> python, PyObject* functions,
               std::weak_ptr<GradientBuffer> buffer, size_t i)
      : python_(std::move(python)), functions_(functions), buffer_(std::move(buffer)), i_(i) {}

  void operator()(const at::Tensor& tensor) override {
    if (is_alone()) {
      const std::shared_ptr<GradientBuffer> buffer = buffer_.lock();
      if (buffer != nullptr && buffer->receive(i_)) return;
    }
    (*python_)(tensor);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { python_->compiled_args(args); }
  void apply_with_saved(at::Tensor& tensor, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    python_->apply_with_saved(tensor, saved);
  }

  // `functions` is the dictionary of parameter i's Python hooks. The hook keeps neither the optimizer nor its buffers
  // alive.
  static void install(const std::shared_ptr<GradientBuffer>& buffer, size_t i, PyObject* functions) {
    std::unique_ptr<PostAccumulateGradHook>& slot =
        torch::autograd::impl::post_acc_grad_hooks(buffer->bound().params.at(i));
    SPARSE_OPT_CHECK(slot != nullptr, "params[", i, "] has no Python post-accumulate hook");
    std::unique_ptr<PostAccumulateGradHook> python = std::move(slot);
    if (auto* earlier = dynamic_cast<GradientHook*>(python.get())) {  // of an earlier mask or optimizer
      std::unique_ptr<PostAccumulateGradHook> inner = std::move(earlier->python_);
      python = std::move(inner);
    }
    slot = std::make_unique<GradientHook>(std::move(python), functions, buffer, i);
  }

  // Whether an optimizer's hook is the only one on the parameter, before and after its gradient is accumulated.
  static bool is_alone_on(const at::Tensor& param) {
    const auto* hook = dynamic_cast<GradientHook*>(torch::autograd::impl::post_acc_grad_hooks(param).get());
    return hook != nullptr && hook->is_alone() && torch::autograd::impl::hooks(param).empty();
  }

 private:
  // Reading the size needs no lock, because it does not change during a backward pass.
  bool is_alone() const { return PyDict_GET_SIZE(functions_) == 1; }

  std::unique_ptr<PostAccumulateGradHook> python_;
  PyObject* functions_;  // python_ holds a reference
  std::weak_ptr<GradientBuffer> buffer_;
  size_t i_;
};

}  // namespace sparse_opt
