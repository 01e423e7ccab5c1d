#include "tile_linear.h"

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "backward_notifier.h"
#include "error_text.h"
#include "gradient_hook.h"

namespace sparse_opt {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [tokens, features]
at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> changed = sizes.vec();
  changed.back() = last;
  return changed;
}

// As in the forward of the layer's class.
at::Tensor product(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   bool transposed) {
  if (!transposed) return at::linear(input, weight, bias);
  return at::addmm(*bias, input.view({-1, input.size(-1)}), weight).view(with_last(input.sizes(), weight.size(1)));
}

class TileLinear : public torch::autograd::Function<TileLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const c10::intrusive_ptr<TileRoute>& route) {
    // Views are hidden from autograd too, so that the result may be changed in place, as that of a linear layer.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    context->set_materialize_grads(false);
    context->saved_data["route"] = c10::IValue::make_capsule(route);
    context->saved_data["bias"] = bias.has_value() && bias->defined();
    // Under autograd at::linear multiplies such an input as one matrix. Without autograd it would multiply batch by
    // batch, which rounds differently.
    const bool folds = !route->transposed && input.dim() > 2 && !input.is_contiguous();
    const at::Tensor folded = folds ? rows_of(input) : input;
    // Autograd would not notice changes in place of a view that is hidden from it.
    const at::Tensor& saved_input = folded.is_alias_of(input) ? input : folded;
    context->save_for_backward({saved_input, input.requires_grad() ? weight : at::Tensor()});
    if (!folds) return product(input, weight, bias, route->transposed);
    at::Tensor out = at::mm(folded, weight.t()).view(with_last(input.sizes(), weight.size(0)));
    return bias.has_value() && bias->defined() ? out.add_(*bias) : out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list found(4);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) return found;
    TORCH_CHECK(
        !at::GradMode::is_enabled(),
        "a linear layer whose weight gradient is computed by tiles can't be differentiated twice (create_graph); "
        "build the optimizer with tile_backward=False");
    const auto route = c10::static_intrusive_pointer_cast<TileRoute>(context->saved_data["route"].toCapsule());
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const at::Tensor grad_rows = rows_of(grad), input_rows = rows_of(input);
    if (context->needs_input_grad(0)) {
      const at::Tensor matrix = route->transposed ? weight.t() : weight;  // [out, in]
      // As in autograd's formula for mm, which returns a column-major gradient for a column-major input.
      const bool columns = input_rows.stride(0) == 1 && input_rows.stride(1) == input_rows.size(0);
      const at::Tensor product = columns ? at::mm(matrix.t(), grad_rows.t()).t() : at::mm(grad_rows, matrix);
      found[0] = product.reshape(with_last(grad.sizes(), input.size(-1)));
    }
    if (context->needs_input_grad(1)) {
      const auto& [left, right] = route->transposed ? std::tie(input_rows, grad_rows) : std::tie(grad_rows, input_rows);
      if (!route->receive(left, right)) found[1] = at::mm(left.t(), right);
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) {
      found[2] = at::sum_to(grad_rows, at::IntArrayRef(grad_rows.size(1)));
    }
    return found;
  }
};

bool has_hooks(const torch::autograd::Node& accumulator) {
  const auto& after = accumulator.post_hooks();
  return !accumulator.pre_hooks().empty() || std::any_of(after.begin(), after.end(), [](const auto& hook) {
    return dynamic_cast<const BackwardNotifier::Hook*>(hook.get()) == nullptr;
  });
}

// The function above does not support other layouts, torch.func's transforms and forward-mode differentiation.
bool is_plain(const at::Tensor& input) {
  return input.layout() == at::kStrided && !input.is_nested() && !input._fw_grad(/*level=*/0).defined() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace

bool TileRoute::receive(const at::Tensor& left, const at::Tensor& right) const {
  const std::shared_ptr<GradientBuffer> owner = buffer.lock();
  if (owner == nullptr) return false;
  const std::string_view use = gradient_use();
  if (use != "accumulated") return use == "unused";
  return owner->receive_tiles(i, left, right) || fallback(left, right);
}

const char* TileRoute::gradient_use() const {
  const std::shared_ptr<GradientBuffer> owner = buffer.lock();
  if (owner == nullptr) return "accumulated";
  const at::Tensor& weight = owner->bound().params[i];
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(weight);
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed != nullptr && !executed->empty()) {
    const auto found = accumulator ? executed->find(&*accumulator) : executed->end();
    if (found == executed->end() || !found->second.should_execute()) return "unused";
    if (found->second.captures_ != nullptr) return "returned";
  }
  if ((!GradientHook::is_alone_on(weight) || (accumulator && has_hooks(*accumulator))) && is_hooked()) return "hooked";
  return weight.requires_grad() ? "accumulated" : "unused";
}

at::Tensor tile_linear(const c10::intrusive_ptr<TileRoute>& route, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias) {
  if (route->buffer.expired() || !is_plain(input)) return product(input, weight, bias, route->transposed);
  const at::DeviceType device = input.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return TileLinear::apply(input, weight, bias, route);
  // A cast inside of the function would be hidden from autograd.
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return TileLinear::apply(at::autocast::cached_cast(dtype, input, device),
                           at::autocast::cached_cast(dtype, weight, device),
                           at::autocast::cached_cast(dtype, bias, device), route);
}

}  // namespace sparse_opt
