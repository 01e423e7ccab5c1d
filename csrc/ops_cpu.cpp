#include <numeric>

#include "ops.h"

// Ops that sparse_opt does not show to its users. sparse_opt/ops defines the schemas of the others.
STABLE_TORCH_LIBRARY_FRAGMENT(SPARSE_OPT_NATIVE, m) {
  // For delta logs.
  m.def("indexed_take_(Tensor[] dense, Tensor(a!) compact, Tensor indices, int[] starts, int[] ends) -> ()");
  // For the optimizers' hooks on a GPU, see ops_cuda.cpp.
  m.def(
      "gather_partly_(Tensor(a!) out, Tensor[] dense, Tensor indices, int[] starts, int[] ends, int[] numbers, int of, "
      "bool accumulate, Tensor(b!) partial_sums, int[] first_partials, Tensor(c!)? found_inf, int run_length, "
      "Tensor? index_bases) -> ()");
  m.def(
      "tile_weight_grad_partly_(Tensor(a!) out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, int[] starts, "
      "int[] ends, int tile_size, bool accumulate, Tensor(b!) partial_sums, int[] first_partials, "
      "Tensor(c!)? found_inf, Tensor? token_offsets) -> ()");
  m.def(
      "add_partial_sums_(Tensor(a!) sum_sq, Tensor partial_sums, int[] starts, int[] ends, Tensor(b!)? clip, "
      "Tensor(c!)? finished, float max_norm) -> ()");
  // On a GPU, the number of parts into which tile_weight_grad_ cuts the tokens of each tile.
  m.def(
      "tile_weight_grad_parts(Tensor out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, int[] starts, "
      "int[] ends, int tile_size) -> int");
}

namespace sparse_opt {
namespace {

struct Cpu {
  template <typename Rule>
  static void step(const StepArguments& args, const void* options, int) {
    cpu::step<Rule>(args, *static_cast<const typename Rule::Options*>(options), parallel_for);
  }
  static void gather(const GatherArguments& args, int) { cpu::masked_grad_gather(args, parallel_for); }
  static void tiles(const TileArguments& args, int) { cpu::tile_weight_grad(args, parallel_for); }
  static void swap(const MoveArguments& args, int) { cpu::indexed_swap(args, parallel_for); }
  static void replace(const ReplaceArguments& args, int) { cpu::indexed_replace(args, parallel_for); }
  static void take(const MoveArguments& args, int) { cpu::indexed_take(args, parallel_for); }
  static void apply(const MoveArguments& args, int) { cpu::delta_apply(args, parallel_for); }

  static std::tuple<Tensor, Tensor, Tensor> encode(DeltaCall& call) {
    std::vector<uint8_t> changed(call.blocks() * kDeltaBlockBytes);
    std::vector<int64_t> block_counts(call.blocks());
    call.args.changed = changed.data();
    call.args.block_counts = block_counts.data();
    cpu::delta_mark(call.args, parallel_for);

    std::vector<int64_t> running_sums(call.blocks());
    std::partial_sum(block_counts.begin(), block_counts.end(), running_sums.begin());
    call.args.running_sums = running_sums.data();
    const auto [indices, values] = call.allocate(running_sums.empty() ? 0 : running_sums.back());
    cpu::delta_collect(call.args, parallel_for);
    Tensor counts = empty({call.args.count}, ScalarType::Long, {});
    for (int64_t i = 0; i < call.args.count; ++i) {
      const auto first = block_counts.begin() + call.first_block[i],
                 last = block_counts.begin() + call.first_block[i + 1];
      counts.mutable_data_ptr<int64_t>()[i] = std::accumulate(first, last, int64_t{0});
    }
    return {indices, values, counts};
  }
};

}  // namespace

KernelTable::OfDevice cpu_table() {
  return table_of<Cpu>();
}

}  // namespace sparse_opt

STABLE_TORCH_LIBRARY_IMPL(SPARSE_OPT_NATIVE, CPU, m) {
  sparse_opt::implement_ops<sparse_opt::Cpu>(m);
}
