// The patch codec's ops for all devices: they check the arguments, collect pointers and call `OnDevice`, which defines
//   static encode(PatchCall&), sample(PatchCall&, PatchSample) and apply(PatchCall&).
#pragma once

#include <tuple>

#include "checks.h"
#include "patch.h"
#include "stable_abi.h"

namespace sparse_opt {

// Kernels require aligned elements. Some of torch's tensors are not aligned, for example those of a mapped file.
inline int64_t misalignment(const TensorView& tensor) {
  if (tensor.numel == 0) return 0;
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  return static_cast<int64_t>(address % static_cast<uintptr_t>(tensor.element_size));
}

inline void check_aligned(const char* name, const TensorView& tensor) {
  SPARSE_OPT_CHECK(misalignment(tensor) == 0, name, " begins ", misalignment(tensor), " bytes past a multiple of ",
                   tensor.element_size, ", expected an aligned tensor");
}

struct PatchCall {
  std::vector<void*> old_tensors, new_tensors;
  std::vector<int64_t> numels, first_tile;
  Device device;
  PatchArguments args;

  PatchCall(const char* name, TensorList tensors, int64_t level, bool is_float, int64_t class_shift)
      : device(checked_device(name, tensors)) {
    SPARSE_OPT_CHECK(0 <= level && level <= 1, "level is ", level, ", expected 0 or 1");
    SPARSE_OPT_CHECK(0 <= class_shift && class_shift <= 64, "class_shift is ", class_shift, ", expected 0 to 64");
    args.level = static_cast<PatchLevel>(level);
    args.is_float = is_float;
    args.class_shift = static_cast<int>(class_shift);
    args.element_size = movable_size(name, tensors[0]);
    old_tensors = aligned_list(name, tensors, device);
    first_tile.push_back(0);
    const int64_t tile = patch_tile(args.level);
    for (const TensorView& tensor : tensors) {
      numels.push_back(tensor.numel);
      first_tile.push_back(first_tile.back() + (tensor.numel + tile - 1) / tile);
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

  void set_width(int64_t width) {
    SPARSE_OPT_CHECK(0 <= width && width < 8 * args.element_size, "width is ", width, ", expected less than ",
                     8 * args.element_size);
    args.width = static_cast<int>(width);
  }

  // The tables of `tight`. Their values are checked when they are read from a file.
  void set_tables(const OptionalTensor& row_of, const OptionalTensor& rows, const OptionalTensor& class_table,
                  const OptionalTensor& values) {
    if (args.level != PatchLevel::kTight) return;
    SPARSE_OPT_CHECK(row_of.has_value() && rows.has_value() && class_table.has_value() && values.has_value(),
                     "level 1 requires row_of, rows, class_table and values");
    const int symbols = patch_symbols(args.element_size);
    check_flat("row_of", *row_of, args.count, device);
    check_dtype("row_of", *row_of, ScalarType::UInt16);
    check_aligned("row_of", *row_of);
    check_flat("rows", *rows, rows->numel / kClasses * kClasses, device);
    check_dtype("rows", *rows, ScalarType::UInt16);
    check_aligned("rows", *rows);
    check_flat("class_table", *class_table, kClasses, device);
    check_dtype("class_table", *class_table, ScalarType::Byte);
    check_flat("values", *values, values->numel / symbols * symbols, device);
    check_dtype("values", *values, ScalarType::UInt16);
    check_aligned("values", *values);
    args.row_of = static_cast<const uint16_t*>(row_of->data);
    args.rows = static_cast<const uint16_t*>(rows->data);
    args.class_table = static_cast<const uint8_t*>(class_table->data);
    args.values = static_cast<const uint16_t*>(values->data);
    args.row_count = static_cast<int>(rows->numel / kClasses);
    args.value_tables = static_cast<int>(values->numel / symbols);
    SPARSE_OPT_CHECK(args.row_count >= 1 && args.value_tables >= 1 && args.value_tables <= kMaxValueTables, "rows are ",
                     args.row_count, " and value tables ", args.value_tables);
  }

  int64_t tiles() const { return first_tile.back(); }
  ScalarType sizes_dtype() const { return args.level == PatchLevel::kTight ? ScalarType::UInt32 : ScalarType::UInt16; }

 private:
  static std::vector<void*> aligned_list(const char* name, TensorList tensors, Device device) {
    std::vector<void*> pointers = list_data(name, tensors, device);
    for (size_t i = 0; i < tensors.size(); ++i) {
      SPARSE_OPT_CHECK(misalignment(tensors[i]) == 0, name, "[", i, "] begins ", misalignment(tensors[i]),
                       " bytes past a multiple of ", tensors[i].element_size, ", expected an aligned tensor");
    }
    return pointers;
  }

  static Device checked_device(const char* name, TensorList tensors) {
    SPARSE_OPT_CHECK(!tensors.empty(), name, " holds no tensor, expected at least one");
    return tensors[0].device;
  }
};

// heads, sizes and records on the device; int64 [count] on the CPU, the number of changes of each tensor.
using Encoded = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename OnDevice>
Encoded patch_encode(TensorList old_list, TensorList new_list, int64_t level, bool is_float, int64_t class_shift,
                     int64_t width, const OptionalTensor& row_of, const OptionalTensor& rows,
                     const OptionalTensor& class_table, const OptionalTensor& values, bool advance) {
  PatchCall call("old", old_list, level, is_float, class_shift);
  SPARSE_OPT_CHECK(!advance || call.args.level != PatchLevel::kTight, "advance is not supported by level 1");
  call.args.advance = advance;
  call.set_new(old_list, new_list);
  call.set_width(width);
  call.set_tables(row_of, rows, class_table, values);
  return OnDevice::encode(call);
}

template <typename OnDevice>
std::tuple<Tensor, Tensor, Tensor> patch_sample(TensorList old_list, TensorList new_list, bool is_float,
                                                int64_t class_shift) {
  PatchCall call("old", old_list, 0, is_float, class_shift);
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
Tensor patch_apply_(TensorList dense, const OptionalTensor& heads, const TensorView& sizes, const TensorView& offsets,
                    const TensorView& records, int64_t level, bool is_float, int64_t class_shift, int64_t width,
                    const OptionalTensor& row_of, const OptionalTensor& rows, const OptionalTensor& class_table,
                    const OptionalTensor& values) {
  PatchCall call("dense", dense, level, is_float, class_shift);
  call.set_width(width);
  call.set_tables(row_of, rows, class_table, values);
  PatchArguments& args = call.args;
  if (args.level != PatchLevel::kTight) {
    SPARSE_OPT_CHECK(heads.has_value(), "level 0 requires heads");
    check_flat("heads", *heads, call.tiles(), call.device);
    check_dtype("heads", *heads, ScalarType::UInt16);
    check_aligned("heads", *heads);
    args.heads = static_cast<uint16_t*>(heads->data);
  }
  check_flat("sizes", sizes, call.tiles(), call.device);
  check_dtype("sizes", sizes, call.sizes_dtype());
  check_aligned("sizes", sizes);
  check_flat("offsets", offsets, call.tiles() + 1, call.device);
  check_dtype("offsets", offsets, ScalarType::Long);
  check_aligned("offsets", offsets);
  check_flat("records", records, records.numel, call.device);
  check_dtype("records", records, ScalarType::Byte);
  Tensor bad_tile = empty({1}, ScalarType::Long, call.device);
  torch::stable::fill_(bad_tile, static_cast<double>(call.tiles()));
  args.sizes = sizes.data;
  args.offsets = static_cast<const int64_t*>(offsets.data);
  args.records = static_cast<uint8_t*>(records.data);
  args.record_bytes = records.numel;
  args.bad_tile = static_cast<int64_t*>(bad_tile.data_ptr());
  if (call.tiles() > 0) OnDevice::apply(call);
  return bad_tile;
}

template <typename OnDevice>
void implement_patch_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("patch_encode", boxed<&patch_encode<OnDevice>>);
  m.impl("patch_sample", boxed<&patch_sample<OnDevice>>);
  m.impl("patch_apply_", boxed<&patch_apply_<OnDevice>>);
}

}  // namespace sparse_opt
