#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

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
  static void run_mark(const DeltaArguments& args) { cuda::delta_mark(args, stream()); }
  static void run_collect(const DeltaArguments& args) { cuda::delta_collect(args, stream()); }
  static void run_apply(const MoveArguments& args) { cuda::delta_apply(args, stream()); }
};

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CUDA, m) {
  sparse_opt::implement_ops<sparse_opt::Cuda>(m);
}
