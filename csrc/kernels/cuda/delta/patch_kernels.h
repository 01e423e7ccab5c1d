// The patch codec's CUDA launchers. They run on `stream` and the current device, allocate nothing and wait for nothing.
// A launch that fails throws std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include "../../delta/patch.h"

namespace sparse_opt::cuda {

void patch_sample(const PatchArguments& args, const PatchSample& sample, cudaStream_t stream);
void count_changes(const PatchArguments& args, cudaStream_t stream);  // adds to args.changes

// find fills sizes, lengths, changes, overflowed, overflows and, but for `tight`, heads; and the slots of records that
// fit. With offsets, the running sums of lengths: place moves those to records, as far as record_bytes goes, and again
// writes the `overflows` others, which want all the room. patch_ are of `fast` and `packed`, tight_ of `tight`.
void encode_to_slots(const PatchArguments& args, cudaStream_t stream);
void compact_slots(const PatchArguments& args, cudaStream_t stream);
void encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream);
void patch_apply(const PatchArguments& args, cudaStream_t stream);

void tight_encode_to_slots(const PatchArguments& args, cudaStream_t stream);
void tight_compact_slots(const PatchArguments& args, cudaStream_t stream);
void tight_encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream);
void tight_apply(const PatchArguments& args, cudaStream_t stream);

}  // namespace sparse_opt::cuda
