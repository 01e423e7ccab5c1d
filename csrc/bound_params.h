// A list of parameters and their segments, turned into C++ once. A step of a model then hands over one object where it
// would convert hundreds of tensors and integers, and finds the gradients itself.
#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <utility>
#include <vector>

namespace sparse_opt {

struct BoundParams : torch::CustomClassHolder {
  std::vector<at::Tensor> params;
  at::Tensor indices;  // [nnz]
  std::vector<int64_t> starts, ends;
  std::vector<at::Tensor> grads;  // of the last take_grads that found them all

  BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
              std::vector<int64_t> ends)
      : params(std::move(params)), indices(std::move(indices)), starts(std::move(starts)), ends(std::move(ends)) {}

  // Hold every parameter's gradient, made contiguous, for the next step. False, and none held, if one has none.
  bool take_grads() {
    grads.clear();
    grads.reserve(params.size());
    for (const at::Tensor& param : params) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) {
        grads.clear();
        return false;
      }
      grads.push_back(grad.contiguous());
    }
    return true;
  }

  // Kernels write through pointers, which autograd does not see.
  void bump_versions() const {
    for (const at::Tensor& param : params) {
      if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
    }
  }
};

using Bound = c10::intrusive_ptr<BoundParams>;

}  // namespace sparse_opt
