#pragma once

#include "chunk_digests.h"
#include "common/arguments.h"

namespace sparse_opt::cpu {

void chunk_digests(const ChunkDigestArguments& args, ParallelFor parallel_for);

}  // namespace sparse_opt::cpu
