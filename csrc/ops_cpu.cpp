#include <ATen/Parallel.h>
#include <torch/library.h>

#include <numeric>

#include "kernels/cpu/kernels.h"
#include "native.h"

// As SCHEMAS in sparse_opt/ops/registry.py, where `backend` is added.
TORCH_LIBRARY(sparse_opt_native, m) {
  m.def(
      "indexed_adamw_(Tensor(a!)[] params, Tensor indices, int[] starts, int[] ends, Tensor(b!) exp_avg, "
      "Tensor(c!) exp_avg_sq, Tensor lr, Tensor steps, *, Tensor? grad=None, Tensor[]? dense_grads=None, "
      "Tensor(z!)? master=None, float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0.01, "
      "Tensor? clip_coef=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool stochastic_rounding=False, "
      "int seed=0, int run_length=1, Tensor? index_bases=None) -> ()");
  m.def(
      "indexed_sgd_(Tensor(a!)[] params, Tensor indices, int[] starts, int[] ends, Tensor(b!)? momentum_buffer, "
      "Tensor lr, Tensor steps, *, Tensor? grad=None, Tensor[]? dense_grads=None, Tensor(z!)? master=None, "
      "float momentum=0.0, float dampening=0.0, bool nesterov=False, float weight_decay=0.0, "
      "Tensor? clip_coef=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool stochastic_rounding=False, "
      "int seed=0, int run_length=1, Tensor? index_bases=None) -> ()");
  m.def(
      "masked_grad_gather_(Tensor(a!) out, Tensor[] dense, Tensor indices, int[] starts, int[] ends, *, "
      "Tensor? scale=None, bool accumulate=False, Tensor(b!)? sum_sq=None, Tensor(c!)? found_inf=None, "
      "int run_length=1, Tensor? index_bases=None) -> ()");
  m.def(
      "tile_weight_grad_(Tensor(a!) out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, int[] starts, "
      "int[] ends, *, int tile_size, Tensor? scale=None, bool accumulate=False, Tensor(b!)? sum_sq=None, "
      "Tensor(c!)? found_inf=None) -> ()");
  m.def(
      "indexed_swap_(Tensor(a!)[] dense, Tensor(b!) compact, Tensor indices, int[] starts, int[] ends, *, "
      "int run_length=1, Tensor? index_bases=None) -> ()");
  // Of delta logs.
  m.def("indexed_take_(Tensor[] dense, Tensor(a!) compact, Tensor indices, int[] starts, int[] ends) -> ()");
  // Of the optimizers: steps are counted up first.
  m.def(
      "counting_adamw_(Tensor(a!)[] params, Tensor indices, int[] starts, int[] ends, Tensor(b!) exp_avg, "
      "Tensor(c!) exp_avg_sq, Tensor lr, Tensor(d!) steps, *, Tensor? grad, Tensor[]? dense_grads, "
      "Tensor(z!)? master, float beta1, float beta2, float eps, float weight_decay, Tensor? clip_coef, "
      "Tensor? grad_scale, Tensor? found_inf, bool stochastic_rounding, int seed, int run_length, "
      "Tensor? index_bases) -> ()");
  m.def(
      "counting_sgd_(Tensor(a!)[] params, Tensor indices, int[] starts, int[] ends, Tensor(b!)? momentum_buffer, "
      "Tensor lr, Tensor(d!) steps, *, Tensor? grad, Tensor[]? dense_grads, Tensor(z!)? master, float momentum, "
      "float dampening, bool nesterov, float weight_decay, Tensor? clip_coef, Tensor? grad_scale, Tensor? found_inf, "
      "bool stochastic_rounding, int seed, int run_length, Tensor? index_bases) -> ()");
  // Of their hooks, on a GPU: see ops_cuda.cpp.
  m.def(
      "gather_partly_(Tensor(a!) out, Tensor[] dense, Tensor indices, int[] starts, int[] ends, int[] numbers, int of, "
      "bool accumulate, Tensor(b!) partial_sums, int[] first_partials, Tensor(c!)? found_inf, int run_length, "
      "Tensor? index_bases) -> ()");
  m.def(
      "tile_weight_grad_partly_(Tensor(a!) out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, int[] starts, "
      "int[] ends, int tile_size, bool accumulate, Tensor(b!) partial_sums, int[] first_partials, "
      "Tensor(c!)? found_inf) -> ()");
  // Of a GPU: into how many parts tile_weight_grad_ cuts the tokens of each tile.
  m.def(
      "tile_weight_grad_parts(Tensor out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, int[] starts, "
      "int[] ends, int tile_size) -> int");
  m.def("add_partial_sums_(Tensor(a!) sum_sq, Tensor partial_sums, int[] starts, int[] ends) -> ()");
  m.def("delta_encode(Tensor[] old, Tensor[] new) -> (Tensor indices, Tensor values, Tensor counts)");
  m.def("delta_apply_(Tensor(a!)[] dense, Tensor indices, Tensor values, int[] starts, int[] ends) -> ()");
}

namespace sparse_opt {
namespace {

// One piece of work is thousands of elements already, so the grain is one.
void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

struct Cpu {
  struct Guard {
    explicit Guard(at::Device) {}
  };
  static void run(const AdamWArguments& args) {
    count_steps(args);
    cpu::indexed_adamw(args, parallel_for);
  }
  static void run(const SgdArguments& args) {
    count_steps(args);
    cpu::indexed_sgd(args, parallel_for);
  }
  static void run(const GatherArguments& args) { cpu::masked_grad_gather(args, parallel_for); }
  static void run(const TileArguments& args) { cpu::tile_weight_grad(args, parallel_for); }
  static void count_steps(const StepArguments& args) {
    if (args.uncounted_steps == nullptr || (args.found_inf != nullptr && *args.found_inf != 0.0f)) return;
    for (int64_t i = 0; i < args.segments.count; ++i) args.uncounted_steps[i] += 1.0f;
  }
  static void run_swap(const MoveArguments& args) { cpu::indexed_swap(args, parallel_for); }
  static void run_take(const MoveArguments& args) { cpu::indexed_take(args, parallel_for); }
  static void run_apply(const MoveArguments& args) { cpu::delta_apply(args, parallel_for); }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> run(DeltaCall& call) {
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
    at::Tensor counts = at::empty({call.args.count}, at::kLong);
    for (int64_t i = 0; i < call.args.count; ++i) {
      const auto first = block_counts.begin() + call.first_block[i],
                 last = block_counts.begin() + call.first_block[i + 1];
      counts.mutable_data_ptr<int64_t>()[i] = std::accumulate(first, last, int64_t{0});
    }
    return {indices, values, counts};
  }
};

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CPU, m) {
  sparse_opt::implement_ops<sparse_opt::Cpu>(m);
}
