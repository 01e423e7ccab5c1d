// The ops except steps (step_op.h), written once for all devices: check, collect pointers, launch. `Device` supplies
//   Guard(at::Device), alive during the launch, and
//   static run(arguments...), an overload for each kind of arguments.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "checks.h"

namespace sparse_opt {

template <typename Device>
void masked_grad_gather_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                         at::IntArrayRef ends, const OptionalTensor& scale, bool accumulate,
                         const OptionalTensor& sum_sq, const OptionalTensor& found_inf, int64_t run_length,
                         const OptionalTensor& index_bases) {
  const at::Device device = indices.device();
  const auto pointers = list_data("dense", dense, device);
  GatherArguments args;
  args.segments = checked_segments("dense", dense, pointers, indices, starts, ends, run_length, index_bases);
  if (!dense.empty()) args.dense_dtype = dtype_of("dense[0]", dense[0]);
  check_flat("out", out, checked_slots(indices, run_length), device);
  args.out_dtype = dtype_of("out", out);
  args.out = out.data_ptr();
  args.scale = optional_float_data("scale", scale, 1, device);
  args.accumulate = accumulate;
  args.sum_sq = optional_float_data("sum_sq", sum_sq, static_cast<int64_t>(dense.size()), device);
  args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  const typename Device::Guard guard(device);
  Device::run(args);
}

// The checked arguments of tile_weight_grad_, and the lists that they point to.
struct TileCall {
  std::vector<void*> grad_outputs, inputs;
  std::vector<int64_t> tokens, rows, columns;
  TileArguments args;

  TileCall(const at::Tensor& out, at::TensorList grad_output_list, at::TensorList input_list, const at::Tensor& tiles,
           at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size, bool accumulate,
           const OptionalTensor& found_inf) {
    const at::Device device = tiles.device();
    const size_t n = grad_output_list.size();
    check_dtype("tiles", tiles, at::kLong);
    SPARSE_OPT_CHECK(tiles.dim() == 2 && tiles.size(1) == 4 && tiles.is_contiguous(), "tiles has sizes ", tiles.sizes(),
                     ", expected contiguous [tiles, 4]");
    SPARSE_OPT_CHECK(tile_size == 64 || tile_size == 128, "tile_size is ", tile_size, ", expected 64 or 128");
    SPARSE_OPT_CHECK(input_list.size() == n && starts.size() == n && ends.size() == n, "grad_outputs holds ", n,
                     " tensors, inputs ", input_list.size(), ", and there are ", starts.size(), " starts and ",
                     ends.size(), " ends");
    grad_outputs = list_data("grad_outputs", grad_output_list, device);
    inputs = list_data("inputs", input_list, device);
    if (n > 0) {
      args.dtype = dtype_of("grad_outputs[0]", grad_output_list[0]);
      check_dtype("inputs[0]", input_list[0], grad_output_list[0].scalar_type());
    }
    for (size_t i = 0; i < n; ++i) {
      const at::Tensor &g = grad_output_list[i], &x = input_list[i];
      SPARSE_OPT_CHECK(
          g.dim() >= 2 && x.dim() >= 2 && g.sizes().slice(0, g.dim() - 1) == x.sizes().slice(0, x.dim() - 1),
          "grad_outputs[", i, "] has sizes ", g.sizes(), " and inputs[", i, "] ", x.sizes(),
          ", expected the same but for the last");
      tokens.push_back(g.size(-1) > 0 ? g.numel() / g.size(-1) : 0);
      rows.push_back(g.size(-1));
      columns.push_back(x.size(-1));
      SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= tiles.size(0), "matrix ", i,
                       " has the tiles [", starts[i], ", ", ends[i], "), expected within [0, ", tiles.size(0), ")");
    }
    args.count = static_cast<int64_t>(n);
    args.grad_outputs = grad_outputs.data();
    args.inputs = inputs.data();
    args.tokens = tokens.data();
    args.rows = rows.data();
    args.columns = columns.data();
    args.starts = starts.data();
    args.ends = ends.data();
    args.tiles = tiles.const_data_ptr<int64_t>();
    args.tile_size = static_cast<int>(tile_size);
    check_flat("out", out, out.numel(), device);
    args.out_dtype = dtype_of("out", out);
    args.out = out.data_ptr();
    args.accumulate = accumulate;
    args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  }
};

template <typename Device>
void tile_weight_grad_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                       const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                       const OptionalTensor& scale, bool accumulate, const OptionalTensor& sum_sq,
                       const OptionalTensor& found_inf) {
  TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, accumulate, found_inf);
  call.args.scale = optional_float_data("scale", scale, 1, tiles.device());
  call.args.sum_sq = optional_float_data("sum_sq", sum_sq, call.args.count, tiles.device());
  const typename Device::Guard guard(tiles.device());
  Device::run(call.args);
}

struct MoveCall {
  std::vector<void*> dense;
  MoveArguments args;

  MoveCall(at::TensorList dense_list, const char* compact_name, const at::Tensor& compact, const at::Tensor& indices,
           at::IntArrayRef starts, at::IntArrayRef ends, int64_t run_length = 1,
           const OptionalTensor& index_bases = std::nullopt) {
    dense = list_data("dense", dense_list, indices.device());
    args.segments = checked_segments("dense", dense_list, dense, indices, starts, ends, run_length, index_bases);
    check_flat(compact_name, compact, checked_slots(indices, run_length), indices.device());
    if (!dense_list.empty()) check_dtype(compact_name, compact, dense_list[0].scalar_type());
    args.element_size = movable_size(compact_name, compact);
    args.compact = compact.data_ptr();
  }
};

template <typename Device>
void indexed_swap_(at::TensorList dense, const at::Tensor& compact, const at::Tensor& indices, at::IntArrayRef starts,
                   at::IntArrayRef ends, int64_t run_length, const OptionalTensor& index_bases) {
  const MoveCall call(dense, "compact", compact, indices, starts, ends, run_length, index_bases);
  const typename Device::Guard guard(indices.device());
  Device::run_swap(call.args);
}

// Of delta logs: compact = dense[indices], bit for bit.
template <typename Device>
void indexed_take_(at::TensorList dense, const at::Tensor& compact, const at::Tensor& indices, at::IntArrayRef starts,
                   at::IntArrayRef ends) {
  const MoveCall call(dense, "compact", compact, indices, starts, ends);
  const typename Device::Guard guard(indices.device());
  Device::run_take(call.args);
}

template <typename Device>
void delta_apply_(at::TensorList dense, const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef starts,
                  at::IntArrayRef ends) {
  const MoveCall call(dense, "values", values, indices, starts, ends);
  const typename Device::Guard guard(indices.device());
  Device::run_apply(call.args);
}

// The checked arguments of delta_encode, and the lists that they point to.
struct DeltaCall {
  std::vector<void*> old_tensors, new_tensors;
  std::vector<int64_t> numels, first_block;
  at::TensorOptions values_options;
  DeltaArguments args;

  DeltaCall(at::TensorList old_list, at::TensorList new_list) {
    SPARSE_OPT_CHECK(!new_list.empty(), "new holds no tensor, expected at least one");
    const at::Device device = new_list[0].device();
    check_same_sizes("old", old_list, "new", new_list);
    check_dtype("old[0]", old_list[0], new_list[0].scalar_type());
    old_tensors = list_data("old", old_list, device);
    new_tensors = list_data("new", new_list, device);
    values_options = new_list[0].options();
    first_block.push_back(0);
    for (const at::Tensor& tensor : new_list) {
      numels.push_back(tensor.numel());
      first_block.push_back(first_block.back() + (tensor.numel() + kDeltaBlock - 1) / kDeltaBlock);
      args.wide_indices = args.wide_indices || tensor.numel() > INT32_MAX;
    }
    args.count = static_cast<int64_t>(new_list.size());
    args.old_tensors = old_tensors.data();
    args.new_tensors = new_tensors.data();
    args.numels = numels.data();
    args.first_block = first_block.data();
    args.element_size = movable_size("new[0]", new_list[0]);
  }

  int64_t blocks() const { return first_block.back(); }
  at::TensorOptions options(at::ScalarType dtype) const { return at::TensorOptions().device(device()).dtype(dtype); }
  at::Device device() const { return values_options.device(); }

  // Allocates indices and values for `changes` changes.
  std::tuple<at::Tensor, at::Tensor> allocate(int64_t changes) {
    at::Tensor indices = at::empty({changes}, options(args.wide_indices ? at::kLong : at::kInt));
    at::Tensor values = at::empty({changes}, values_options);
    args.indices = indices.data_ptr();
    args.values = values.data_ptr();
    args.capacity = changes;
    return {indices, values};
  }
};

template <typename Device>
std::tuple<at::Tensor, at::Tensor, at::Tensor> delta_encode(at::TensorList old_list, at::TensorList new_list) {
  DeltaCall call(old_list, new_list);
  const typename Device::Guard guard(call.device());
  return Device::run(call);
}

// sparse_opt/ops defines the schemas of the public ops, ops_cpu.cpp those of the others.
template <typename Device, typename Library>
void implement_ops(Library& m) {
  m.impl("masked_grad_gather_", &masked_grad_gather_<Device>);
  m.impl("tile_weight_grad_", &tile_weight_grad_<Device>);
  m.impl("indexed_swap_", &indexed_swap_<Device>);
  m.impl("indexed_take_", &indexed_take_<Device>);
  m.impl("delta_encode", &delta_encode<Device>);
  m.impl("delta_apply_", &delta_apply_<Device>);
}

}  // namespace sparse_opt
