// Takes a gradient as soon as autograd has made it, to be gathered, without Python: a model has hundreds of hooks in
// each backward pass, on a thread that would have to take the interpreter's lock for each.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "bound_params.h"
#include "error_text.h"

namespace sparse_opt {

// A tensor has one post-accumulate hook. Python's is a dictionary of functions; this one stands before it, and does the
// work of the dictionary's one function, the optimizer's, where BoundParams can. It leaves everything to the dictionary
// where others have put functions there too, whose order counts, and where the optimizer is gone.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::unique_ptr<PostAccumulateGradHook> python, PyObject* functions, std::weak_ptr<BoundParams> bound,
               size_t i)
      : python_(std::move(python)), functions_(functions), bound_(std::move(bound)), i_(i) {}

  void operator()(const at::Tensor& tensor) override {
    // Without the lock: a number is read, which changes while no backward pass runs.
    if (PyDict_GET_SIZE(functions_) == 1) {
      const std::shared_ptr<BoundParams> bound = bound_.lock();
      if (bound != nullptr && bound->receive(i_)) return;
    }
    (*python_)(tensor);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { python_->compiled_args(args); }
  void apply_with_saved(at::Tensor& tensor, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    python_->apply_with_saved(tensor, saved);
  }

  // For parameter i of `bound`, whose Python hooks are `functions`. Keeps neither the optimizer nor its buffers alive.
  static void install(const std::shared_ptr<BoundParams>& bound, size_t i, PyObject* functions) {
    std::unique_ptr<PostAccumulateGradHook>& slot = torch::autograd::impl::post_acc_grad_hooks(bound->param(i));
    SPARSE_OPT_CHECK(slot != nullptr, "params[", i, "] has no post-accumulate hook of Python's");
    std::unique_ptr<PostAccumulateGradHook> python = std::move(slot);
    if (auto* earlier = dynamic_cast<GradientHook*>(python.get())) {  // of a mask or an optimizer before
      std::unique_ptr<PostAccumulateGradHook> inner = std::move(earlier->python_);
      python = std::move(inner);
    }
    slot = std::make_unique<GradientHook>(std::move(python), functions, bound, i);
  }

 private:
  std::unique_ptr<PostAccumulateGradHook> python_;
  PyObject* functions_;  // python_ holds a reference
  std::weak_ptr<BoundParams> bound_;
  size_t i_;
};

}  // namespace sparse_opt
