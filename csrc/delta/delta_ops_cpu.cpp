// The patch codec's schemas and CPU ops. sparse_opt/delta/codec/torch_reference.py defines the same functions.
#include <algorithm>

#include "delta_ops.h"

STABLE_TORCH_LIBRARY_FRAGMENT(SPARSE_OPT_NATIVE, m) {
  m.def(
      "patch_sample(Tensor[] old, Tensor[] new, bool is_float, int class_shift) -> "
      "(Tensor seen, Tensor changed, Tensor symbols)");
  m.def(
      "patch_encode(Tensor[] old, Tensor[] new, bool is_float, int class_shift, Tensor row_of, Tensor rows, "
      "Tensor class_table, Tensor values) -> (Tensor sizes, Tensor records, Tensor counts)");
  m.def(
      "patch_apply_(Tensor(a!)[] dense, Tensor sizes, Tensor offsets, Tensor records, bool is_float, int class_shift, "
      "Tensor row_of, Tensor rows, Tensor class_table, Tensor values) -> Tensor");
}

namespace sparse_opt {
namespace {

struct Cpu {
  static void sample(PatchCall& call, const PatchSample& sample) { cpu::patch_sample(call.args, sample, parallel_for); }

  static void apply(PatchCall& call) { cpu::patch_apply(call.args, parallel_for); }

  static Encoded encode(PatchCall& call) {
    PatchArguments& args = call.args;
    const Tensor sizes = empty({args.tiles()}, ScalarType::UInt32, call.device);
    const Tensor counts = zeros({args.count}, ScalarType::Long, {});
    args.sizes = static_cast<uint32_t*>(sizes.data_ptr());
    args.changes = static_cast<int64_t*>(counts.data_ptr());
    const std::vector<std::vector<uint8_t>> pieces = cpu::patch_encode(args, parallel_for);

    std::vector<int64_t> begins(pieces.size() + 1);
    for (size_t i = 0; i < pieces.size(); ++i) begins[i + 1] = begins[i] + static_cast<int64_t>(pieces[i].size());
    const Tensor records = empty({begins.back()}, ScalarType::Byte, call.device);
    uint8_t* out = static_cast<uint8_t*>(records.data_ptr());
    parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) std::copy(pieces[i].begin(), pieces[i].end(), out + begins[i]);
    });
    return {sizes, records, counts};
  }
};

}  // namespace
}  // namespace sparse_opt

STABLE_TORCH_LIBRARY_IMPL(SPARSE_OPT_NATIVE, CPU, m) {
  sparse_opt::implement_patch_ops<sparse_opt::Cpu>(m);
}
