// A linear layer whose weight gradient is never made: of it, the active tiles go straight into the optimizer's buffer.
#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>

#include "bound_params.h"

namespace sparse_opt {

// Where the weight gradient of a layer goes: to parameter i of `bound`. Keeps neither the optimizer nor its buffers
// alive; without them it is the layer that torch has.
struct TileRoute : torch::CustomClassHolder {
  TileRoute(std::weak_ptr<BoundParams> bound, size_t i, bool transposed)
      : bound(std::move(bound)), i(i), transposed(transposed) {}

  // What the backward pass that this thread runs does with the weight's gradient: "accumulated", "returned" (by
  // torch.autograd.grad, which accumulates nothing anywhere), or "nothing".
  const char* wanted() const;

  std::weak_ptr<BoundParams> bound;
  size_t i;
  bool transposed;  // the weight is [in, out], as in transformers' Conv1D
};

// torch.nn.Linear's forward, or Conv1D's where the route says so: [..., in] -> [..., out], the same bits, and in the
// backward pass the same gradients of input and bias. The weight's is one of three: by tiles; not at all, where none is
// wanted; or dense, where it is asked for by torch.autograd.grad or nobody takes tiles any more.
at::Tensor tile_linear(const c10::intrusive_ptr<TileRoute>& route, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias);

}  // namespace sparse_opt
