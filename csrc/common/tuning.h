// Launch sizes that depend on the GPU and change no bit of any result: "Tuning tables" in docs/notebook.md.
#pragma once

#include <cuda_runtime_api.h>

namespace sparse_opt::cuda {

struct Tuning {
  int encode_blocks;         // of delta_encode for each multiprocessor, 44 KiB of shared memory each
  int scattered_swap_bytes;  // dense bytes per active element from which a swap has few in flight; 0: never
};

inline Tuning tuning_of(int device) {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9 ? Tuning{3, 32} : Tuning{2, 0};
}

}  // namespace sparse_opt::cuda
