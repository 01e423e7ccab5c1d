// The patch codec's CUDA launchers. They launch on `stream` of the current device and do not allocate or synchronize.
// If a launch fails they throw std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include "patch.h"

namespace sparse_opt::cuda {

void patch_sample(const PatchArguments& args, const PatchSample& sample, cudaStream_t stream);

// The encoder's three steps. encode_to_slots writes sizes, lengths, changes, overflowed, overflows, heads (not at
// `tight`), and the slots of the records that fit. Given offsets, the running sums of lengths: compact_slots copies
// those to records, if they end within record_bytes, and encode_overflow writes the `overflows` others, for which
// records must be large enough. The functions with tight_ are for `tight`, the others for `packed`.
void encode_to_slots(const PatchArguments& args, cudaStream_t stream);
void compact_slots(const PatchArguments& args, cudaStream_t stream);
void encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream);
void patch_apply(const PatchArguments& args, cudaStream_t stream);

void tight_encode_to_slots(const PatchArguments& args, cudaStream_t stream);
void tight_compact_slots(const PatchArguments& args, cudaStream_t stream);
void tight_encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream);
void tight_apply(const PatchArguments& args, cudaStream_t stream);

}  // namespace sparse_opt::cuda
