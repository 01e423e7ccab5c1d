// The patch codec's schemas and CPU ops. sparse_opt/delta/codec/torch_reference.py defines the same functions.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/delta/patch_codec.h"
#include "patch_native.h"

TORCH_LIBRARY_FRAGMENT(sparse_opt_native, m) {
  m.def(
      "patch_sample(Tensor[] old, Tensor[] new, bool is_float, int class_shift) -> "
      "(Tensor seen, Tensor changed, Tensor symbols)");
  m.def(
      "patch_encode(Tensor(a!)[] old, Tensor[] new, int level, bool is_float, int class_shift, int width, "
      "Tensor? row_of, Tensor? rows, Tensor? class_table, Tensor? values, bool advance) -> "
      "(Tensor heads, Tensor sizes, Tensor records, Tensor counts)");
  m.def("count_changes(Tensor[] old, Tensor[] new) -> Tensor");
  m.def(
      "patch_apply_(Tensor(a!)[] dense, Tensor? heads, Tensor sizes, Tensor offsets, Tensor records, int level, "
      "bool is_float, int class_shift, int width, Tensor? row_of, Tensor? rows, Tensor? class_table, Tensor? values) "
      "-> Tensor");
}

namespace sparse_opt {
namespace {

// The grain is 1, because one piece of work is many thousands of words.
void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

struct Cpu {
  struct Guard {
    explicit Guard(at::Device) {}
  };

  static void sample(PatchCall& call, const PatchSample& sample) { cpu::patch_sample(call.args, sample, parallel_for); }

  static void count_changes(PatchCall& call) { cpu::count_changes(call.args, parallel_for); }

  static void apply(PatchCall& call) { cpu::patch_apply(call.args, parallel_for); }

  static Encoded encode(PatchCall& call) {
    PatchArguments& args = call.args;
    const char* fault = cpu::patch_tables_fault(args);
    SPARSE_OPT_CHECK(fault == nullptr, fault);
    const bool has_heads = args.level != PatchLevel::kTight;
    const at::Tensor heads = at::empty({has_heads ? call.tiles() : 0}, call.options(at::kUInt16));
    const at::Tensor sizes = at::empty({call.tiles()}, call.options(call.sizes_dtype()));
    const at::Tensor counts = at::zeros({args.count}, at::kLong);
    args.heads = static_cast<uint16_t*>(heads.data_ptr());
    args.sizes = sizes.data_ptr();
    args.changes = counts.mutable_data_ptr<int64_t>();
    const std::vector<std::vector<uint8_t>> pieces = cpu::patch_encode(args, parallel_for);

    std::vector<int64_t> begins(pieces.size() + 1);
    for (size_t i = 0; i < pieces.size(); ++i) begins[i + 1] = begins[i] + static_cast<int64_t>(pieces[i].size());
    const at::Tensor records = at::empty({begins.back()}, call.options(at::kByte));
    uint8_t* out = records.mutable_data_ptr<uint8_t>();
    parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) std::copy(pieces[i].begin(), pieces[i].end(), out + begins[i]);
    });
    for (int64_t i = 0; args.advance && i < args.count; ++i) {
      if (args.changes[i] == 0) continue;
      std::memcpy(args.old_tensors[i], args.new_tensors[i], args.numels[i] * args.element_size);
    }
    return {heads, sizes, records, counts};
  }
};

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CPU, m) {
  sparse_opt::implement_patch_ops<sparse_opt::Cpu>(m);
}
