// The ops except steps and those of delta/, written once for all devices: check, launch. `OnDevice` supplies functions
// that take the checked arguments and the number of the device, and launch on its current stream.
#pragma once

#include <tuple>

#include "calls.h"
#include "delta/delta_codec.h"
#include "kernel_table.h"
#include "stable_abi.h"
#include "step_op.h"

namespace sparse_opt {

template <typename OnDevice>
void masked_grad_gather_(const TensorView& out, TensorList dense, const TensorView& indices, Ints starts, Ints ends,
                         const OptionalTensor& scale, bool accumulate, const OptionalTensor& sum_sq,
                         const OptionalTensor& found_inf, int64_t run_length, const OptionalTensor& index_bases) {
  const GatherCall call(out, dense, indices, starts, ends, scale, accumulate, sum_sq, found_inf, run_length,
                        index_bases);
  OnDevice::gather(call.args, indices.device.index);
}

template <typename OnDevice>
void tile_weight_grad_(const TensorView& out, TensorList grad_outputs, TensorList inputs, const TensorView& tiles,
                       Ints starts, Ints ends, int64_t tile_size, const OptionalTensor& scale, bool accumulate,
                       const OptionalTensor& sum_sq, const OptionalTensor& found_inf,
                       const OptionalTensor& token_offsets) {
  TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, accumulate, found_inf);
  call.args.scale = optional_float_data("scale", scale, 1, tiles.device);
  call.args.sum_sq = optional_float_data("sum_sq", sum_sq, call.args.count, tiles.device);
  call.set_token_offsets(token_offsets, tiles.device);
  OnDevice::tiles(call.args, tiles.device.index);
}

template <typename OnDevice>
void indexed_swap_(TensorList dense, const TensorView& compact, const TensorView& indices, Ints starts, Ints ends,
                   int64_t run_length, const OptionalTensor& index_bases) {
  const MoveCall call(dense, "compact", compact, indices, starts, ends, run_length, index_bases);
  OnDevice::swap(call.args, indices.device.index);
}

template <typename OnDevice>
void indexed_replace_(TensorList dense, const TensorView& before, const TensorView& after, const TensorView& indices,
                      Ints starts, Ints ends, int64_t run_length, const OptionalTensor& index_bases) {
  const ReplaceCall call(dense, before, after, indices, starts, ends, run_length, index_bases);
  OnDevice::replace(call.args, indices.device.index);
}

// Of delta logs: compact = dense[indices], bit for bit.
template <typename OnDevice>
void indexed_take_(TensorList dense, const TensorView& compact, const TensorView& indices, Ints starts, Ints ends) {
  const MoveCall call(dense, "compact", compact, indices, starts, ends);
  OnDevice::take(call.args, indices.device.index);
}

template <typename OnDevice>
void delta_apply_(TensorList dense, const TensorView& indices, const TensorView& values, Ints starts, Ints ends) {
  const MoveCall call(dense, "values", values, indices, starts, ends);
  OnDevice::apply(call.args, indices.device.index);
}

// The checked arguments of delta_encode, and the lists that they point to.
struct DeltaCall {
  std::vector<void*> old_tensors, new_tensors;
  std::vector<int64_t> numels, first_block;
  Device device;
  ScalarType dtype;
  DeltaArguments args;

  DeltaCall(TensorList old_list, TensorList new_list) {
    SPARSE_OPT_CHECK(!new_list.empty(), "new holds no tensor, expected at least one");
    device = new_list[0].device;
    dtype = new_list[0].dtype;
    check_same_sizes("old", old_list, "new", new_list);
    check_dtype("old[0]", old_list[0], dtype);
    old_tensors = list_data("old", old_list, device);
    new_tensors = list_data("new", new_list, device);
    first_block.push_back(0);
    for (const TensorView& tensor : new_list) {
      numels.push_back(tensor.numel);
      first_block.push_back(first_block.back() + (tensor.numel + kDeltaBlock - 1) / kDeltaBlock);
      args.wide_indices = args.wide_indices || tensor.numel > INT32_MAX;
    }
    args.count = static_cast<int64_t>(new_list.size());
    args.old_tensors = old_tensors.data();
    args.new_tensors = new_tensors.data();
    args.numels = numels.data();
    args.first_block = first_block.data();
    args.element_size = movable_size("new[0]", new_list[0]);
  }

  int64_t blocks() const { return first_block.back(); }

  // Allocates indices and values for `changes` changes.
  std::tuple<Tensor, Tensor> allocate(int64_t changes) {
    Tensor indices = empty({changes}, args.wide_indices ? ScalarType::Long : ScalarType::Int, device);
    Tensor values = empty({changes}, dtype, device);
    args.indices = indices.data_ptr();
    args.values = values.data_ptr();
    args.capacity = changes;
    return {indices, values};
  }
};

template <typename OnDevice>
std::tuple<Tensor, Tensor, Tensor> delta_encode(TensorList old_list, TensorList new_list) {
  DeltaCall call(old_list, new_list);
  return OnDevice::encode(call);
}

// A step op. The arguments are on the stack in the order in which StepInputs lists them.
template <typename Rule, typename OnDevice>
void step(StableIValue* stack, uint64_t count, uint64_t) {
  StepInputs<Rule> inputs;
  uint64_t expected = 0;
  inputs.for_each([&](const char*, auto&) { ++expected; });
  if (count != expected) throw std::logic_error("sparse_opt: the schema of a step op is not its kernel's");
  Owners owners;
  inputs.for_each([&](const char*, auto& input) { owners.take(*stack++, input); });
  const StepCall<Rule> call(inputs);
  if (!inputs.check_only) OnDevice::template step<Rule>(call.args, &inputs.options, inputs.indices.device.index);
}

// sparse_opt/ops/schemas.py defines the schemas of the public ops, ops_cpu.cpp those of the others.
template <typename OnDevice>
void implement_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("masked_grad_gather_", boxed<&masked_grad_gather_<OnDevice>>);
  m.impl("tile_weight_grad_", boxed<&tile_weight_grad_<OnDevice>>);
  m.impl("indexed_swap_", boxed<&indexed_swap_<OnDevice>>);
  m.impl("indexed_replace_", boxed<&indexed_replace_<OnDevice>>);
  m.impl("indexed_take_", boxed<&indexed_take_<OnDevice>>);
  m.impl("delta_encode", boxed<&delta_encode<OnDevice>>);
  m.impl("delta_apply_", boxed<&delta_apply_<OnDevice>>);
#define SPARSE_OPT_IMPLEMENT(Rule) m.impl(Rule::kOp, &step<Rule, OnDevice>);
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_IMPLEMENT)
#undef SPARSE_OPT_IMPLEMENT
}

template <typename OnDevice>
KernelTable::OfDevice table_of() {
  KernelTable::OfDevice table;
#define SPARSE_OPT_ENTER(Rule) table.step[k##Rule] = &OnDevice::template step<Rule>;
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_ENTER)
#undef SPARSE_OPT_ENTER
  table.gather = &OnDevice::gather;
  table.tiles = &OnDevice::tiles;
  table.swap = &OnDevice::swap;
  table.replace = &OnDevice::replace;
  return table;
}

// Of ops_cpu.cpp and ops_cuda.cpp.
KernelTable::OfDevice cpu_table();
void add_cuda(KernelTable& table);

}  // namespace sparse_opt
