#pragma once

#include <cuda_runtime_api.h>

#include "chunk_digests.h"

namespace sparse_opt::cuda {

// The same conditions as for the launchers of the ops (common/arguments.h).
void chunk_digests(const ChunkDigestArguments& args, cudaStream_t stream);

}  // namespace sparse_opt::cuda
