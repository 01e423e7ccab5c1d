// The op that computes the digests of tensors, on each device.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "error_text.h"
#include "kernels/cpu/delta/chunk_digests.h"

#ifdef SPARSE_OPT_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/delta/chunk_digests.h"
#endif

TORCH_LIBRARY_FRAGMENT(sparse_opt_native, m) {
  // For sparse_opt/delta/digest.py. Returns uint8 [chunks, 16], the chunks of all tensors one after the other.
  m.def("chunk_digests(Tensor[] tensors) -> Tensor");
}

namespace sparse_opt {
namespace {

// The arguments of a call, and the lists that they point to. Tensors may have any dtypes and are on one device.
struct DigestCall {
  std::vector<void*> pointers;
  std::vector<int64_t> sizes, first_chunk = {0};
  at::Tensor digests;  // [chunks, kDigestBytes]
  ChunkDigestArguments args;

  explicit DigestCall(at::TensorList tensors) {
    SPARSE_OPT_CHECK(!tensors.empty(), "tensors holds no tensor, expected at least one");
    const at::Device device = tensors[0].device();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      SPARSE_OPT_CHECK(t.device() == device, "tensors[", i, "] is on ", t.device(), ", expected ", device);
      SPARSE_OPT_CHECK(t.is_contiguous(), "tensors[", i, "] has strides ", t.strides(), ", expected contiguous");
      pointers.push_back(const_cast<void*>(t.const_data_ptr()));  // Segments has void*; nothing is written
      sizes.push_back(static_cast<int64_t>(t.nbytes()));
      first_chunk.push_back(first_chunk.back() + digest_chunks(sizes.back()));
    }
    digests = at::empty({first_chunk.back(), kDigestBytes}, tensors[0].options().dtype(at::kByte));
    args.count = static_cast<int64_t>(tensors.size());
    args.tensors = pointers.data();
    args.sizes = sizes.data();
    args.first_chunk = first_chunk.data();
    args.digests = digests.mutable_data_ptr<uint8_t>();
  }
};

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

at::Tensor chunk_digests_cpu(at::TensorList tensors) {
  const DigestCall call(tensors);
  cpu::chunk_digests(call.args, parallel_for);
  return call.digests;
}

#ifdef SPARSE_OPT_WITH_CUDA
at::Tensor chunk_digests_cuda(at::TensorList tensors) {
  const c10::cuda::CUDAGuard guard(tensors[0].device());  // the dispatcher chose this function by a tensor
  const DigestCall call(tensors);
  cuda::chunk_digests(call.args, c10::cuda::getCurrentCUDAStream().stream());
  return call.digests;
}
#endif

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CPU, m) {
  m.impl("chunk_digests", &sparse_opt::chunk_digests_cpu);
}

#ifdef SPARSE_OPT_WITH_CUDA
TORCH_LIBRARY_IMPL(sparse_opt_native, CUDA, m) {
  m.impl("chunk_digests", &sparse_opt::chunk_digests_cuda);
}
#endif
