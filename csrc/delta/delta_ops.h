// The patch codec's ops for all devices: they check the arguments, collect pointers and call `OnDevice`, which defines
//   static encode(PatchCall&), sample(PatchCall&, PatchSample) and apply(PatchCall&).
#pragma once

#include <tuple>

#include "checks.h"
#include "patch.h"
#include "stable_abi.h"

namespace sparse_opt {

// Kernels require aligned elements. Some of torch's tensors are not aligned, for example those of a mapped file.
void check_aligned(const TensorView& tensor, const auto&... name) {
  if (tensor.numel == 0) return;
  const auto past = reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(tensor.element_size);
  SPARSE_OPT_CHECK(past == 0, name..., " begins ", past, " bytes past a multiple of ", tensor.element_size,
                   ", expected an aligned tensor");
}

struct PatchCall {
  std::vector<void*> old_tensors, new_tensors;
  std::vector<int64_t> numels, first_tile;
  Device device;
  PatchArguments args;

  PatchCall(const char* name, TensorList tensors, bool is_float, int64_t class_shift) {
    SPARSE_OPT_CHECK(!tensors.empty(), name, " holds no tensor, expected at least one");
    device = tensors[0].device;
    SPARSE_OPT_CHECK(0 <= class_shift && class_shift <= 64, "class_shift is ", class_shift, ", expected 0 to 64");
    args.is_float = is_float;
    args.class_shift = static_cast<int>(class_shift);
    args.element_size = movable_size(name, tensors[0]);
    old_tensors = aligned_list(name, tensors, device);
    first_tile.push_back(0);
    for (const TensorView& tensor : tensors) {
      numels.push_back(tensor.numel);
      first_tile.push_back(first_tile.back() + (tensor.numel + kPatchTile - 1) / kPatchTile);
    }
    args.count = static_cast<int64_t>(tensors.size());
    args.old_tensors = old_tensors.data();
    args.numels = numels.data();
    args.first_tile = first_tile.data();
  }

  void set_new(TensorList old_list, TensorList new_list) {
    check_same_sizes("old", old_list, "new", new_list);
    check_dtype("new[0]", new_list[0], old_list[0].dtype);
    new_tensors = aligned_list("new", new_list, device);
    args.new_tensors = new_tensors.data();
  }

  // Their values are checked when they are read from a file.
  void set_tables(const TensorView& row_of, const TensorView& rows, const TensorView& class_table,
                  const TensorView& values) {
    const int symbols = patch_symbols(args.element_size);
    args.row_of = elements<uint16_t>("row_of", row_of, args.count, ScalarType::UInt16);
    args.rows = elements<uint16_t>("rows", rows, rows.numel / kClasses * kClasses, ScalarType::UInt16);
    args.class_table = elements<uint8_t>("class_table", class_table, kClasses, ScalarType::Byte);
    args.values = elements<uint16_t>("values", values, values.numel / symbols * symbols, ScalarType::UInt16);
    args.row_count = static_cast<int>(rows.numel / kClasses);
    args.value_tables = static_cast<int>(values.numel / symbols);
    SPARSE_OPT_CHECK(args.row_count >= 1 && args.value_tables >= 1 && args.value_tables <= kMaxValueTables, "rows are ",
                     args.row_count, " and value tables ", args.value_tables);
  }

  // The memory of a flat, aligned tensor on the call's device.
  template <typename Number>
  Number* elements(const char* name, const TensorView& tensor, int64_t length, ScalarType dtype) const {
    check_flat(name, tensor, length, device);
    check_dtype(name, tensor, dtype);
    check_aligned(tensor, name);
    return static_cast<Number*>(tensor.data);
  }

 private:
  static std::vector<void*> aligned_list(const char* name, TensorList tensors, Device device) {
    std::vector<void*> pointers = list_data(name, tensors, device);
    for (size_t i = 0; i < tensors.size(); ++i) check_aligned(tensors[i], name, "[", i, "]");
    return pointers;
  }
};

// sizes and records on the device; int64 [count] on the CPU, the number of changes of each tensor.
using Encoded = std::tuple<Tensor, Tensor, Tensor>;

template <typename OnDevice>
Encoded patch_encode(TensorList old_list, TensorList new_list, bool is_float, int64_t class_shift,
                     const TensorView& row_of, const TensorView& rows, const TensorView& class_table,
                     const TensorView& values) {
  PatchCall call("old", old_list, is_float, class_shift);
  call.set_new(old_list, new_list);
  call.set_tables(row_of, rows, class_table, values);
  return OnDevice::encode(call);
}

template <typename OnDevice>
std::tuple<Tensor, Tensor, Tensor> patch_sample(TensorList old_list, TensorList new_list, bool is_float,
                                                int64_t class_shift) {
  PatchCall call("old", old_list, is_float, class_shift);
  call.set_new(old_list, new_list);
  // One tensor for all three, so that one copy transfers them to the host.
  const int64_t rows = call.args.count * kClasses, symbols = patch_symbols(call.args.element_size);
  const Tensor sums = zeros({2 * rows + kClasses * symbols}, ScalarType::Long, call.device);
  auto* seen = static_cast<int64_t*>(sums.data_ptr());
  OnDevice::sample(call, {seen, seen + rows, seen + 2 * rows});
  Tensor found = sums;
  if (call.device.type != DeviceType::CPU) {  // asynchronous: the caller waits for the stream, or for an event on it
    found = host_memory(sums.numel(), ScalarType::Long);
    torch::stable::copy_(found, sums, /*non_blocking=*/true);
  }
  const auto table = [&](int64_t begin, int64_t count, int64_t columns) {
    return torch::stable::view(part(found, begin, begin + count * columns), std::vector<int64_t>{count, columns});
  };
  return {table(0, call.args.count, kClasses), table(rows, call.args.count, kClasses),
          table(2 * rows, kClasses, symbols)};
}

// Returns int64 [1] on the device: the first damaged tile, or the number of tiles if none is damaged.
template <typename OnDevice>
Tensor patch_apply_(TensorList dense, const TensorView& sizes, const TensorView& offsets, const TensorView& records,
                    bool is_float, int64_t class_shift, const TensorView& row_of, const TensorView& rows,
                    const TensorView& class_table, const TensorView& values) {
  PatchCall call("dense", dense, is_float, class_shift);
  call.set_tables(row_of, rows, class_table, values);
  PatchArguments& args = call.args;
  args.sizes = call.elements<uint32_t>("sizes", sizes, args.tiles(), ScalarType::UInt32);
  args.offsets = call.elements<int64_t>("offsets", offsets, args.tiles() + 1, ScalarType::Long);
  args.records = call.elements<uint8_t>("records", records, records.numel, ScalarType::Byte);
  args.record_bytes = records.numel;
  Tensor bad_tile = empty({1}, ScalarType::Long, call.device);
  torch::stable::fill_(bad_tile, static_cast<double>(args.tiles()));
  args.bad_tile = static_cast<int64_t*>(bad_tile.data_ptr());
  if (args.tiles() > 0) OnDevice::apply(call);
  return bad_tile;
}

template <typename OnDevice>
void implement_patch_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("patch_encode", boxed<&patch_encode<OnDevice>>);
  m.impl("patch_sample", boxed<&patch_sample<OnDevice>>);
  m.impl("patch_apply_", boxed<&patch_apply_<OnDevice>>);
}

}  // namespace sparse_opt
