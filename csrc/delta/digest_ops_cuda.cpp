// The op that computes the digests of tensors on a GPU; on a CPU the package xxhash does.
#include <vector>

#include "chunk_digests.h"
#include "cuda_stream.h"
#include "error_text.h"
#include "stable_abi.h"

STABLE_TORCH_LIBRARY_FRAGMENT(SPARSE_OPT_NATIVE, m) {
  // For sparse_opt/delta/digest.py. Returns uint8 [chunks, 16], the chunks of all tensors one after the other.
  m.def("chunk_digests(Tensor[] tensors) -> Tensor");
}

namespace sparse_opt {
namespace {

// The arguments of a call, and the lists that they point to. Tensors may have any dtypes and are on one GPU.
struct DigestCall {
  std::vector<void*> pointers;
  std::vector<int64_t> sizes, first_chunk = {0};
  Device device;
  ChunkDigestArguments args;

  explicit DigestCall(TensorList tensors) {
    SPARSE_OPT_CHECK(!tensors.empty(), "tensors holds no tensor, expected at least one");
    device = tensors[0].device;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorView& t = tensors[i];
      SPARSE_OPT_CHECK(t.device == device, "tensors[", i, "] is on ", t.device, ", expected ", device);
      SPARSE_OPT_CHECK(t.contiguous, "tensors[", i, "] has strides ", t.strides(), ", expected contiguous");
      SPARSE_OPT_CHECK(t.readable, "tensors[", i, "] has no memory that a kernel could use");
      pointers.push_back(t.data);
      sizes.push_back(t.nbytes());
      first_chunk.push_back(first_chunk.back() + digest_chunks(sizes.back()));
    }
    args.count = static_cast<int64_t>(tensors.size());
    args.tensors = pointers.data();
    args.sizes = sizes.data();
    args.first_chunk = first_chunk.data();
  }

  Tensor allocate() {  // [chunks, kDigestBytes]
    Tensor digests = empty({first_chunk.back(), kDigestBytes}, ScalarType::Byte, device);
    args.digests = static_cast<uint8_t*>(digests.data_ptr());
    return digests;
  }
};

Tensor chunk_digests_cuda(TensorList tensors) {
  DigestCall call(tensors);
  const OnStream stream(call.device.index);
  const Tensor digests = call.allocate();
  cuda::chunk_digests(call.args, stream);
  return digests;
}

}  // namespace
}  // namespace sparse_opt

STABLE_TORCH_LIBRARY_IMPL(SPARSE_OPT_NATIVE, CUDA, m) {
  m.impl("chunk_digests", sparse_opt::boxed<&sparse_opt::chunk_digests_cuda>);
}
