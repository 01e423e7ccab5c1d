#include <algorithm>
#include <numeric>

#include "cuda_stream.h"
#include "delta_codec.h"
#include "delta_ops.h"

STABLE_TORCH_LIBRARY_FRAGMENT(SPARSE_OPT_NATIVE, m) {
  // For sparse_opt/delta/digest.py; on a CPU the package xxhash computes them. Returns uint8 [chunks, 16], the chunks
  // of all tensors one after the other.
  m.def("chunk_digests(Tensor[] tensors) -> Tensor");
}

namespace sparse_opt {
namespace {

struct CudaPatches {
  static void sample(PatchCall& call, const PatchSample& sample) {
    cuda::patch_sample(call.args, sample, OnStream(call.device.index));
  }

  static Encoded encode(PatchCall& call) {
    const OnStream stream(call.device.index);
    PatchArguments& args = call.args;
    const Tensor sizes = empty({args.tiles()}, ScalarType::UInt32, call.device);
    const Tensor lengths = empty({args.tiles()}, ScalarType::Long, call.device);
    const Tensor offsets = zeros({args.tiles() + 1}, ScalarType::Long, call.device);
    // The number of tiles whose record does not fit its slot, and the changes of each tensor.
    const Tensor counts = zeros({1 + args.count}, ScalarType::Long, call.device);
    const Tensor value_ends = running_values(call);
    args.sizes = static_cast<uint32_t*>(sizes.data_ptr());
    args.lengths = static_cast<int64_t*>(lengths.data_ptr());
    args.offsets = static_cast<int64_t*>(offsets.data_ptr());
    args.overflows = static_cast<int64_t*>(counts.data_ptr());
    args.changes = args.overflows + 1;
    args.value_ends = static_cast<const int32_t*>(value_ends.data_ptr());

    args.slot_bytes = static_cast<int>(kPatchTile / 8) * args.element_size;
    const Tensor slots = empty({args.tiles() * args.slot_bytes}, ScalarType::Byte, call.device);
    const Tensor overflowed = empty({args.tiles()}, ScalarType::Long, call.device);
    args.slots = static_cast<uint8_t*>(slots.data_ptr());
    args.overflowed = static_cast<int64_t*>(overflowed.data_ptr());
    cuda::encode_to_slots(args, stream);
    call_torch("aten::cumsum", "out", lengths, int64_t{0}, std::nullopt, part(offsets, 1, args.tiles() + 1));

    // Records that fit are moved before the host knows their total length, so that the device need not wait for it.
    Tensor records = empty({initial_capacity(call)}, ScalarType::Byte, call.device);
    const auto compact = [&] {
      args.records = static_cast<uint8_t*>(records.data_ptr());
      args.record_bytes = records.numel();
      if (args.tiles() > 0) cuda::compact_slots(args, stream);
    };
    compact();
    const Tensor found = host_memory(2 + args.count, ScalarType::Long);
    Tensor found_counts = part(found, 0, 1 + args.count), found_total = part(found, 1 + args.count, 2 + args.count);
    torch::stable::copy_(found_counts, counts, /*non_blocking=*/true);
    torch::stable::copy_(found_total, part(offsets, args.tiles(), args.tiles() + 1), /*non_blocking=*/true);
    check_cuda(cudaStreamSynchronize(stream));
    const int64_t overflows = static_cast<int64_t*>(found.data_ptr())[0];
    const int64_t total = static_cast<int64_t*>(found.data_ptr())[1 + args.count];
    if (total > records.numel()) {
      records = empty({total}, ScalarType::Byte, call.device);
      compact();
    }
    cuda::encode_overflow(args, overflows, stream);
    // The returned tensor should not keep much unused memory allocated.
    const bool oversized = records.numel() - total > kSmallCapacity;
    records = part(records, 0, total);
    return {sizes, oversized ? torch::stable::clone(records) : records,
            torch::stable::clone(part(found, 1, 1 + args.count))};
  }

  static void apply(PatchCall& call) {
    const OnStream stream(call.device.index);
    PatchArguments& args = call.args;
    const uintptr_t past = reinterpret_cast<uintptr_t>(args.records) % kRecordUnit;
    SPARSE_OPT_CHECK(past == 0, "records begin ", past, " bytes past a multiple of ", kRecordUnit,
                     ", expected an aligned tensor");
    const Tensor value_ends = running_values(call);
    args.value_ends = static_cast<const int32_t*>(value_ends.data_ptr());
    cuda::patch_apply(args, stream);
  }

 private:
  static constexpr int64_t kSmallCapacity = int64_t{64} << 20;  // bytes

  // Bytes for the first allocation of the records: enough for any records of small tensors, for few changes of others.
  static int64_t initial_capacity(const PatchCall& call) {
    const int64_t numel = std::accumulate(call.numels.begin(), call.numels.end(), int64_t{0});
    const int64_t raw = numel * call.args.element_size;
    return std::min(raw + kRecordUnit * call.args.tiles(), std::max(kSmallCapacity, raw / 16));
  }

  static Tensor running_values(const PatchCall& call) {
    const PatchArguments& args = call.args;
    const int64_t symbols = patch_symbols(args.element_size), tables = args.value_tables;
    const Tensor values = torch::stable::from_blob(
        const_cast<uint16_t*>(args.values), std::vector<int64_t>{tables, symbols}, std::vector<int64_t>{symbols, 1},
        torch::stable::Device(DeviceType::CUDA, call.device.index), ScalarType::UInt16);
    return call_torch("aten::cumsum", "", torch::stable::to(values, ScalarType::Int), int64_t{1},
                      std::optional<ScalarType>(ScalarType::Int));
  }
};

Tensor chunk_digests_cuda(TensorList tensors) {
  SPARSE_OPT_CHECK(!tensors.empty(), "tensors holds no tensor, expected at least one");
  const Device device = tensors[0].device;
  std::vector<void*> pointers;
  std::vector<int64_t> sizes;
  int64_t chunks = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {  // of any dtypes
    const TensorView& t = tensors[i];
    SPARSE_OPT_CHECK(t.device == device, "tensors[", i, "] is on ", t.device, ", expected ", device);
    SPARSE_OPT_CHECK(t.contiguous, "tensors[", i, "] has strides ", t.strides(), ", expected contiguous");
    SPARSE_OPT_CHECK(t.readable, "tensors[", i, "] has no memory that a kernel could use");
    pointers.push_back(t.data);
    sizes.push_back(t.nbytes());
    chunks += (sizes.back() + kDigestChunk - 1) / kDigestChunk;
  }
  const OnStream stream(device.index);
  const Tensor digests = empty({chunks, kDigestBytes}, ScalarType::Byte, device);
  const auto count = static_cast<int64_t>(tensors.size());
  cuda::chunk_digests({count, pointers.data(), sizes.data(), static_cast<uint8_t*>(digests.data_ptr())}, stream);
  return digests;
}

}  // namespace
}  // namespace sparse_opt

STABLE_TORCH_LIBRARY_IMPL(SPARSE_OPT_NATIVE, CUDA, m) {
  sparse_opt::implement_patch_ops<sparse_opt::CudaPatches>(m);
  m.impl("chunk_digests", sparse_opt::boxed<&sparse_opt::chunk_digests_cuda>);
}
