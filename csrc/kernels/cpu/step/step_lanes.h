// Steps in fp32 alone, sixteen slots at a time from gather to scatter, by AVX-512. Blocks (blocks.h) prefetch a block's
// lines at once and then compute while the queue of misses runs dry; here the lines of sixteen slots are prefetched
// between two short computations, and the processor overlaps all of it. bench/kernels/cpu_step.py measures what it
// gains.
#pragma once

#include "../../arguments.h"
#include "../common/blocks.h"

namespace sparse_opt::cpu {

// Whether a call is computed in lanes: everything in fp32 (the processor neither gathers nor scatters 16-bit words), no
// separate masters or weights, single elements at positions of 16 or 32 bits, and a processor and a compiler that have
// AVX-512.
bool runs_in_lanes(const StepArguments& args);

// The step on one chunk of a call that runs in lanes.
template <typename Rule>
void step_in_lanes(const StepArguments& args, const Chunk& chunk, const typename Rule::CallScalars& call,
                   const typename Rule::TensorScalars& tensor);

}  // namespace sparse_opt::cpu
