// The ops, written once for all devices: check, collect pointers, launch. `Device` supplies
//   Guard(at::Device), alive during the launch, and
//   static run(arguments...), an overload for each kind of arguments.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "checks.h"

namespace sparse_opt {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = std::optional<std::vector<at::Tensor>>;

// Fills the part that AdamW and SGD share. Holds the pointer lists that the arguments point to.
template <typename Arguments>
struct StepCall {
  std::vector<void*> params, dense_grads;
  Arguments args;

  StepCall(at::TensorList param_list, const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends,
           const at::Tensor& lr, const at::Tensor& steps, const OptionalTensor& grad,
           const OptionalTensors& dense_grad_list, const OptionalTensor& master, const OptionalTensor& clip_coef,
           const OptionalTensor& grad_scale, const OptionalTensor& found_inf, bool stochastic_rounding, int64_t seed) {
    const at::Device device = indices.device();
    const int64_t nnz = indices.numel();
    const auto count = static_cast<int64_t>(param_list.size());
    params = list_data("params", param_list, device);
    args.segments = checked_segments("params", param_list, params, indices, starts, ends);
    if (count > 0) args.param_dtype = dtype_of("params[0]", param_list[0]);
    SPARSE_OPT_CHECK(grad.has_value() != dense_grad_list.has_value(), "wanted exactly one of grad and dense_grads");
    if (grad.has_value()) {
      check_flat("grad", *grad, nnz, device);
      args.grad = grad->data_ptr();
      args.grad_dtype = dtype_of("grad", *grad);
    } else {
      check_same_sizes("dense_grads", *dense_grad_list, "params", param_list);
      dense_grads = list_data("dense_grads", *dense_grad_list, device);
      args.dense_grads = dense_grads.data();
      if (count > 0) args.grad_dtype = dtype_of("dense_grads[0]", dense_grad_list->front());
    }
    args.master = optional_float_data("master", master, nnz, device);
    args.lr = float_data("lr", lr, 1, device);
    args.steps = float_data("steps", steps, count, device);
    args.clip_coef = optional_float_data("clip_coef", clip_coef, 1, device);
    args.grad_scale = optional_float_data("grad_scale", grad_scale, 1, device);
    args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
    args.stochastic_rounding = stochastic_rounding;
    args.seed = static_cast<uint64_t>(seed);
  }

  void* state(const char* name, const at::Tensor& tensor, const at::Tensor& indices) {
    check_flat(name, tensor, indices.numel(), indices.device());
    args.moment_dtype = dtype_of(name, tensor);
    SPARSE_OPT_CHECK(args.moment_dtype != DType::kFloat16, name, " is Half, wanted float32 or bfloat16");
    return tensor.data_ptr();
  }
};

template <typename Device>
void indexed_adamw_(at::TensorList params, const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends,
                    const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& lr,
                    const at::Tensor& steps, const OptionalTensor& grad, OptionalTensors dense_grads,
                    const OptionalTensor& master, double beta1, double beta2, double eps, double weight_decay,
                    const OptionalTensor& clip_coef, const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                    bool stochastic_rounding, int64_t seed) {
  StepCall<AdamWArguments> call(params, indices, starts, ends, lr, steps, grad, dense_grads, master, clip_coef,
                                grad_scale, found_inf, stochastic_rounding, seed);
  call.args.exp_avg = call.state("exp_avg", exp_avg, indices);
  call.args.exp_avg_sq = call.state("exp_avg_sq", exp_avg_sq, indices);
  check_dtype("exp_avg_sq", exp_avg_sq, exp_avg.scalar_type());
  call.args.beta1 = beta1;
  call.args.beta2 = beta2;
  call.args.eps = eps;
  call.args.weight_decay = weight_decay;
  const typename Device::Guard guard(indices.device());
  Device::run(call.args);
}

template <typename Device>
void indexed_sgd_(at::TensorList params, const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends,
                  const OptionalTensor& momentum_buffer, const at::Tensor& lr, const at::Tensor& steps,
                  const OptionalTensor& grad, OptionalTensors dense_grads, const OptionalTensor& master,
                  double momentum, double dampening, bool nesterov, double weight_decay,
                  const OptionalTensor& clip_coef, const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                  bool stochastic_rounding, int64_t seed) {
  StepCall<SgdArguments> call(params, indices, starts, ends, lr, steps, grad, dense_grads, master, clip_coef,
                              grad_scale, found_inf, stochastic_rounding, seed);
  if (momentum_buffer.has_value()) {
    call.args.momentum_buffer = call.state("momentum_buffer", *momentum_buffer, indices);
  }
  call.args.momentum = momentum;
  call.args.dampening = dampening;
  call.args.nesterov = nesterov;
  call.args.weight_decay = weight_decay;
  const typename Device::Guard guard(indices.device());
  Device::run(call.args);
}

template <typename Device>
void masked_grad_gather_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                         at::IntArrayRef ends, const OptionalTensor& scale, bool accumulate,
                         const OptionalTensor& sum_sq, const OptionalTensor& found_inf) {
  const at::Device device = indices.device();
  const auto pointers = list_data("dense", dense, device);
  GatherArguments args;
  args.segments = checked_segments("dense", dense, pointers, indices, starts, ends);
  if (!dense.empty()) args.dense_dtype = dtype_of("dense[0]", dense[0]);
  check_flat("out", out, indices.numel(), device);
  args.out_dtype = dtype_of("out", out);
  args.out = out.data_ptr();
  args.scale = optional_float_data("scale", scale, 1, device);
  args.accumulate = accumulate;
  args.sum_sq = optional_float_data("sum_sq", sum_sq, static_cast<int64_t>(dense.size()), device);
  args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  const typename Device::Guard guard(device);
  Device::run(args);
}

struct MoveCall {
  std::vector<void*> dense;
  MoveArguments args;

  MoveCall(at::TensorList dense_list, const char* compact_name, const at::Tensor& compact, const at::Tensor& indices,
           at::IntArrayRef starts, at::IntArrayRef ends) {
    dense = list_data("dense", dense_list, indices.device());
    args.segments = checked_segments("dense", dense_list, dense, indices, starts, ends);
    check_flat(compact_name, compact, indices.numel(), indices.device());
    if (!dense_list.empty()) check_dtype(compact_name, compact, dense_list[0].scalar_type());
    args.element_size = movable_size(compact_name, compact);
    args.compact = compact.data_ptr();
  }
};

template <typename Device>
void indexed_swap_(at::TensorList dense, const at::Tensor& compact, const at::Tensor& indices, at::IntArrayRef starts,
                   at::IntArrayRef ends) {
  const MoveCall call(dense, "compact", compact, indices, starts, ends);
  const typename Device::Guard guard(indices.device());
  Device::run_swap(call.args);
}

template <typename Device>
void delta_apply_(at::TensorList dense, const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef starts,
                  at::IntArrayRef ends) {
  const MoveCall call(dense, "values", values, indices, starts, ends);
  const typename Device::Guard guard(indices.device());
  Device::run_apply(call.args);
}

// Two passes: the first marks the changed elements in a bitmap and counts them by block, the second collects them at
// the running sums of the counts. Between them the host waits for the device, once: it must know the outputs' size.
template <typename Device>
std::tuple<at::Tensor, at::Tensor, at::Tensor> delta_encode(at::TensorList old_list, at::TensorList new_list) {
  SPARSE_OPT_CHECK(!new_list.empty(), "new holds no tensor, wanted at least one");
  const at::Device device = new_list[0].device();
  check_same_sizes("old", old_list, "new", new_list);
  check_dtype("old[0]", old_list[0], new_list[0].scalar_type());
  const auto old_tensors = list_data("old", old_list, device), new_tensors = list_data("new", new_list, device);
  const auto count = static_cast<int64_t>(new_list.size());

  std::vector<int64_t> numels;
  at::Tensor first_block = at::empty({count + 1}, at::kLong);
  int64_t* first = first_block.mutable_data_ptr<int64_t>();
  first[0] = 0;
  bool wide = false;
  for (int64_t i = 0; i < count; ++i) {
    numels.push_back(new_list[i].numel());
    first[i + 1] = first[i] + (numels[i] + kDeltaBlock - 1) / kDeltaBlock;
    wide = wide || numels[i] > INT32_MAX;
  }
  const int64_t blocks = first[count];

  const typename Device::Guard guard(device);
  const auto options = at::TensorOptions().device(device);
  const at::Tensor changed = at::empty({blocks * kDeltaBlockBytes}, options.dtype(at::kByte));
  const at::Tensor block_counts = at::empty({blocks}, options.dtype(at::kInt));
  DeltaArguments args;
  args.count = count;
  args.old_tensors = old_tensors.data();
  args.new_tensors = new_tensors.data();
  args.numels = numels.data();
  args.first_block = first;
  args.element_size = movable_size("new[0]", new_list[0]);
  args.changed = static_cast<uint8_t*>(changed.data_ptr());
  args.block_counts = static_cast<int32_t*>(block_counts.data_ptr());
  args.wide_indices = wide;
  Device::run_mark(args);

  const at::Tensor offsets = at::zeros({blocks + 1}, options.dtype(at::kLong));
  at::Tensor running_sums = offsets.slice(0, 1);
  at::cumsum_out(running_sums, block_counts, 0, at::kLong);
  const at::Tensor bounds = offsets.index_select(0, first_block.to(device)).cpu();  // [count + 1], waits
  const int64_t total = bounds.const_data_ptr<int64_t>()[count];
  at::Tensor indices = at::empty({total}, options.dtype(wide ? at::kLong : at::kInt));
  at::Tensor values = at::empty({total}, new_list[0].options());
  if (total > 0) {
    args.offsets = static_cast<const int64_t*>(offsets.data_ptr());
    args.indices = indices.data_ptr();
    args.values = values.data_ptr();
    Device::run_collect(args);
  }
  return {indices, values, bounds.diff()};
}

// The schemas are those of sparse_opt/ops/registry.py, less `backend`.
template <typename Device, typename Library>
void implement_ops(Library& m) {
  m.impl("indexed_adamw_", &indexed_adamw_<Device>);
  m.impl("indexed_sgd_", &indexed_sgd_<Device>);
  m.impl("masked_grad_gather_", &masked_grad_gather_<Device>);
  m.impl("indexed_swap_", &indexed_swap_<Device>);
  m.impl("delta_encode", &delta_encode<Device>);
  m.impl("delta_apply_", &delta_apply_<Device>);
}

}  // namespace sparse_opt
