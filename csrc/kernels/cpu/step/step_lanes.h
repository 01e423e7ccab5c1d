// Steps in fp32 alone, sixteen slots at a time from gather to scatter, by AVX-512. Blocks (blocks.h) ask memory for a
// block's lines at once and then compute while the queue of misses runs dry; here sixteen slots' lines are asked for
// between two short computations, and the processor overlaps all of it.
#pragma once

#include "../../arguments.h"
#include "../../update.h"
#include "../common/blocks.h"

namespace sparse_opt::cpu {

// Whether this call is taken: everything in fp32 (16-bit words are neither gathered nor scattered by the processor), no
// separate masters, single elements by positions of 16 or 32 bits, and a processor and a compiler that have AVX-512.
bool takes_lanes(const StepArguments& args);

// Of calls that are taken.
void adamw_lanes(const AdamWArguments& args, const Chunk& chunk, const AdamWScalars& scalars);
void sgd_lanes(const SgdArguments& args, const Chunk& chunk, const SgdScalars& scalars);

}  // namespace sparse_opt::cpu
