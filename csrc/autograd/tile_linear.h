// A linear layer that never computes its dense weight gradient: the active tiles go directly into the GradientBuffer.
#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <functional>
#include <memory>
#include <optional>

#include "gradient_buffer.h"

namespace sparse_opt {

// The destination of a layer's weight gradient: parameter i of `buffer`. It keeps neither the optimizer nor its buffers
// alive; without them the layer is an ordinary one.
struct TileRoute : torch::CustomClassHolder {
  // Called, with no lock held, with operands that the buffer does not accept; false if the optimizer refuses them too.
  using Fallback = std::function<bool(const at::Tensor& left, const at::Tensor& right)>;

  TileRoute(std::weak_ptr<GradientBuffer> buffer, size_t i, bool transposed, Fallback fallback,
            std::function<bool()> is_hooked)
      : buffer(std::move(buffer)),
        i(i),
        transposed(transposed),
        fallback(std::move(fallback)),
        is_hooked(std::move(is_hooked)) {}

  // Give the gradient left^T @ right to the buffer, or else to the fallback. Returns false if a dense one is needed.
  bool receive(const at::Tensor& left, const at::Tensor& right) const;
  // How this thread's backward pass uses the weight's gradient: see GradientUse in tile_backward.py.
  const char* gradient_use() const;

  std::weak_ptr<GradientBuffer> buffer;
  size_t i;
  bool transposed;  // the weight is [in, out], as in transformers' Conv1D
  Fallback fallback;
  // Called if the weight or its node has had hooks of others: whether it has any now.
  std::function<bool()> is_hooked;
};

// The forward of torch.nn.Linear, or of Conv1D if `transposed`: [..., in] -> [..., out], to the same bits, with the
// same gradients of input and bias. The weight's gradient is computed by tiles; not at all if it is unused; and dense
// if torch.autograd.grad returns it, if hooks of others use it, or if the optimizer no longer collects it.
at::Tensor tile_linear(const c10::intrusive_ptr<TileRoute>& route, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias);

}  // namespace sparse_opt
