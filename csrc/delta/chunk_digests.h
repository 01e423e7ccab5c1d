// XXH3 of every chunk of a list of tensors: raw pointers and sizes, already checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sparse_opt {

constexpr int64_t kDigestChunk = 65536;  // bytes; a tensor's last chunk may be shorter
constexpr int64_t kDigestBytes = 16;

// The chunks of all tensors are numbered one after the other.
struct ChunkDigestArguments {
  int64_t count = 0;
  void* const* tensors = nullptr;  // [count], the list in host memory; only read, of any alignment
  const int64_t* sizes = nullptr;  // [count], bytes, in host memory
  uint8_t* digests = nullptr;      // [chunks, kDigestBytes], big-endian; aligned to 16
};

namespace cuda {

// The same conditions as for the launchers of the ops (common/arguments.h).
void chunk_digests(const ChunkDigestArguments& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace sparse_opt
