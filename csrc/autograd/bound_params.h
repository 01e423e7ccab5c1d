// A list of parameters and the segments of their active elements, converted to C++ once. A step of a model then passes
// one object instead of hundreds of tensors and integers, and finds the dense gradients itself.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
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

  // Keep every parameter's gradient, made contiguous, for the next step. Returns false, and keeps none, if one has no
  // gradient, or one that is not strided or of another shape.
  bool take_grads();

  // Free the gradients that take_grads() keeps.
  void release_grads() { held_grads(false); }

  // Call the step op on the list. `arguments` are those of its schema; set here are the bound ones, and without `grad`
  // and `dense_grads` the gradients kept by take_grads(), which are released. The parameters' versions are incremented,
  // because kernels write through pointers, which autograd does not see. With check_only the arguments are checked, and
  // nothing else happens.
  void step(const c10::OperatorHandle& op, torch::jit::Stack arguments);

  // indexed_swap_ on the list; versions are incremented as by step().
  void swap(const at::Tensor& compact) const;
  // indexed_replace_, likewise.
  void replace(const at::Tensor& before, const at::Tensor& after) const;

  // masked_grad_gather_ of `dense`, tensors of the sizes of the list, or one of the size of parameter `only`; of the
  // list itself without them.
  void gather(const at::Tensor& out, const std::optional<std::vector<at::Tensor>>& dense,
              const std::optional<at::Tensor>& scale, bool accumulate, const std::optional<at::Tensor>& sum_sq,
              const std::optional<at::Tensor>& found_inf, std::optional<size_t> only = std::nullopt) const;

  const std::vector<at::Tensor> params;
  const at::Tensor indices;                 // [nnz / run_length]
  const std::vector<int64_t> starts, ends;  // the slots of each parameter in every [nnz] tensor
  const int64_t run_length;
  const std::optional<at::Tensor> index_bases;
  const std::vector<int64_t> numels;  // of each parameter when it was bound

 private:
  c10::IValue held_grads(bool keep);
  void check_numels() const;
  void bump_versions() const;

  const std::vector<std::pair<const char*, c10::IValue>> bound_;  // the arguments of step() that do not change

  std::mutex mutex_;   // for grads_; no thread may wait for it while it holds the interpreter's lock
  c10::IValue grads_;  // of all parameters, or None
};

}  // namespace sparse_opt
