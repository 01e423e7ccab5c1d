#pragma once

#include "common/arguments.h"
#include "kernels/chunk_digests.h"

namespace sparse_opt::cpu {

void chunk_digests(const ChunkDigestArguments& args, ParallelFor parallel_for);

}  // namespace sparse_opt::cpu
