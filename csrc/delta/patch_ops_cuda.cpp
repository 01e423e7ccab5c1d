#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "kernels/cuda/delta/patch_kernels.h"
#include "patch_native.h"

namespace sparse_opt {
namespace {

struct CudaPatches {
  using Guard = c10::cuda::CUDAGuard;

  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

  static void sample(PatchCall& call, const PatchSample& sample) { cuda::patch_sample(call.args, sample, stream()); }

  static void count_changes(PatchCall& call) { cuda::count_changes(call.args, stream()); }

  static Encoded encode(PatchCall& call) {
    PatchArguments& args = call.args;
    const bool tight = args.level == PatchLevel::kTight;
    const at::Tensor heads = at::empty({tight ? 0 : call.tiles()}, call.options(at::kUInt16));
    const at::Tensor sizes = at::empty({call.tiles()}, call.options(call.sizes_dtype()));
    const at::Tensor lengths = at::empty({call.tiles()}, call.options(at::kLong));
    const at::Tensor offsets = at::zeros({call.tiles() + 1}, call.options(at::kLong));
    // The number of tiles whose record does not fit its slot, and the changes of each tensor.
    const at::Tensor counts = at::zeros({1 + args.count}, call.options(at::kLong));
    const at::Tensor value_ends = running_values(call);
    args.heads = static_cast<uint16_t*>(heads.data_ptr());
    args.sizes = sizes.data_ptr();
    args.lengths = lengths.mutable_data_ptr<int64_t>();
    args.offsets = offsets.const_data_ptr<int64_t>();
    args.overflows = counts.mutable_data_ptr<int64_t>();
    args.changes = args.overflows + 1;
    if (tight) args.value_ends = value_ends.const_data_ptr<int32_t>();

    args.slot_bytes = static_cast<int>(patch_tile(args.level) / 8) * args.element_size;
    const at::Tensor slots = at::empty({call.tiles() * args.slot_bytes}, call.options(at::kByte));
    const at::Tensor overflowed = at::empty({call.tiles()}, call.options(at::kLong));
    args.slots = slots.mutable_data_ptr<uint8_t>();
    args.overflowed = overflowed.mutable_data_ptr<int64_t>();
    tight ? cuda::tight_encode_to_slots(args, stream()) : cuda::encode_to_slots(args, stream());
    at::Tensor sums = offsets.slice(0, 1);
    at::cumsum_out(sums, lengths, 0);

    // Records that fit are moved before the host knows their total length, so that the device need not wait for it.
    at::Tensor records = at::empty({initial_capacity(call)}, call.options(at::kByte));
    const auto compact = [&] {
      args.records = records.mutable_data_ptr<uint8_t>();
      args.record_bytes = records.numel();
      if (call.tiles() > 0) tight ? cuda::tight_compact_slots(args, stream()) : cuda::compact_slots(args, stream());
    };
    compact();
    const at::Tensor found = at::empty({2 + args.count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
    found.slice(0, 0, 1 + args.count).copy_(counts, /*non_blocking=*/true);
    found.slice(0, 1 + args.count).copy_(offsets.slice(0, call.tiles()), /*non_blocking=*/true);
    c10::cuda::getCurrentCUDAStream().synchronize();
    const int64_t overflows = found.const_data_ptr<int64_t>()[0];
    const int64_t total = found.const_data_ptr<int64_t>()[1 + args.count];
    if (total > records.numel()) {
      records = at::empty({total}, call.options(at::kByte));
      compact();
    }
    tight ? cuda::tight_encode_overflow(args, overflows, stream()) : cuda::encode_overflow(args, overflows, stream());
    // The returned tensor should not keep much unused memory allocated.
    const bool oversized = records.numel() - total > kSmallCapacity;
    records = records.slice(0, 0, total);
    return {heads, sizes, oversized ? records.clone() : records, found.slice(0, 1, 1 + args.count).clone()};
  }

  static void apply(PatchCall& call) {
    PatchArguments& args = call.args;
    const bool tight = args.level == PatchLevel::kTight;
    const uintptr_t unit = tight ? kTightUnit : kRecordUnit, past = reinterpret_cast<uintptr_t>(args.records) % unit;
    SPARSE_OPT_CHECK(past == 0, "records begin ", past, " bytes past a multiple of ", unit,
                     ", expected an aligned tensor");
    if (!tight) return cuda::patch_apply(args, stream());
    const at::Tensor value_ends = running_values(call);
    args.value_ends = value_ends.const_data_ptr<int32_t>();
    cuda::tight_apply(args, stream());
  }

 private:
  static constexpr int64_t kSmallCapacity = int64_t{64} << 20;  // bytes

  // Bytes for the first allocation of the records: enough for any records of small tensors, for few changes of others.
  static int64_t initial_capacity(const PatchCall& call) {
    const int64_t numel = std::accumulate(call.numels.begin(), call.numels.end(), int64_t{0});
    const int64_t raw = numel * call.args.element_size;
    return std::min(raw + kRecordUnit * call.tiles(), std::max(kSmallCapacity, raw / 16));
  }

  static at::Tensor running_values(const PatchCall& call) {
    const PatchArguments& args = call.args;
    if (args.level != PatchLevel::kTight) return {};
    const at::Tensor values =
        at::from_blob(const_cast<uint16_t*>(args.values), {args.value_tables, patch_symbols(args.element_size)},
                      call.options(at::kUInt16));
    return values.to(at::kInt).cumsum(1, at::kInt);
  }
};

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CUDA, m) {
  sparse_opt::implement_patch_ops<sparse_opt::CudaPatches>(m);
}
