#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "kernels/cuda/kernels.h"
#include "native.h"

namespace sparse_opt {
namespace {

struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

  static void run(const AdamWArguments& args) { cuda::indexed_adamw(args, stream()); }
  static void run(const SgdArguments& args) { cuda::indexed_sgd(args, stream()); }
  static void run(const GatherArguments& args) {
    at::Tensor partial_sums;  // freed on return; the allocator keeps the order of the stream
    if (args.sum_sq != nullptr) {
      partial_sums =
          at::empty({cuda::gather_blocks(args.segments)}, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat));
    }
    cuda::masked_grad_gather(args, args.sum_sq != nullptr ? partial_sums.data_ptr<float>() : nullptr, stream());
  }
  static void run_swap(const MoveArguments& args) { cuda::indexed_swap(args, stream()); }
  static void run_apply(const MoveArguments& args) { cuda::delta_apply(args, stream()); }

  // The number of changes is known when they are found, and memory for them is needed before: as much as there can be if
  // that is little, else what a sample lets expect. If the sample was wrong, the second try knows the number.
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> run(DeltaCall& call) {
    int64_t numel = 0;
    for (const int64_t n : call.numels) numel += n;
    const int64_t change_bytes = call.args.element_size + (call.args.wide_indices ? 8 : 4);
    int64_t room = numel * change_bytes <= kSmallRoom ? numel : std::min(numel, expected_changes(call));
    for (;;) {
      auto [indices, values] = call.allocate(room);
      const at::Tensor progress = at::zeros({call.blocks()}, call.options(at::kLong));
      const at::Tensor bounds = at::zeros({call.args.count}, call.options(at::kLong));
      call.args.room = room;
      call.args.progress = static_cast<uint64_t*>(progress.data_ptr());
      call.args.bounds = bounds.mutable_data_ptr<int64_t>();
      cuda::delta_encode(call.args, stream());
      at::Tensor counts = bounds.cpu();  // waits
      int64_t* count = counts.mutable_data_ptr<int64_t>();
      int64_t total = 0;
      for (int64_t i = 0; i < call.args.count; ++i) {
        const int64_t before = total;
        if (call.numels[i] > 0) total = count[i];  // the kernel does not see an empty tensor
        count[i] = total - before;
      }
      if (total <= room) {
        indices = indices.slice(0, 0, total);
        values = values.slice(0, 0, total);
        // What is kept should not hold much memory that is not its own.
        if (total < room - room / 4) return {indices.clone(), values.clone(), counts};
        return {indices, values, counts};
      }
      room = total;
    }
  }

 private:
  static constexpr int64_t kSmallRoom = int64_t{64} << 20;  // bytes
  static constexpr int64_t kSampleStride = 64;              // blocks

  // Six per cent and eight standard deviations more than the changes in a sample make likely, were they independent.
  static int64_t expected_changes(DeltaCall& call) {
    at::Tensor sampled = at::zeros({1}, call.options(at::kLong));
    call.args.sample_stride = kSampleStride;
    call.args.sampled = sampled.mutable_data_ptr<int64_t>();
    cuda::delta_sample(call.args, stream());
    const auto found = static_cast<double>(sampled.item<int64_t>());
    return static_cast<int64_t>(kSampleStride * (1.0625 * found + 8.0 * std::sqrt(found) + 1024.0));
  }
};

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CUDA, m) {
  sparse_opt::implement_ops<sparse_opt::Cuda>(m);
}
