// The CUDA launchers. They launch on `stream` of the current device, do not allocate or synchronize, and can be
// captured in a graph. If a launch fails they throw std::runtime_error, which names the op.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"

namespace sparse_opt::cuda {

// One step of the optimizer that rules/ defines as Rule. `tensors`, [args.segments.count], is scratch memory on the
// device, which only this call reads and writes.
template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, typename Rule::TensorScalars* tensors,
          cudaStream_t stream);

// Two lists in host memory, [args.segments.count]; both may be null. partial_sums[i]: fp32 [gather_blocks] on
// the device, the sums of squares of the blocks of segment i. numbers[i]: the number of segment i in index_bases; null
// is 0, 1, 2... args.sum_sq is not written: sum_partials adds up the partial sums of all segments, in one array, to
// sum_sq, fp32 [segments.count]. The segments may have been gathered in several calls.
void masked_grad_gather(const GatherArguments& args, const void* const* partial_sums, const int64_t* numbers,
                        cudaStream_t stream);
void sum_partials(const Segments& segments, const float* partial_sums, float* sum_sq, cudaStream_t stream);
// The same, and in the same launch the norm of all of them.
void sum_partials_and_clip(const Segments& segments, const float* partial_sums, float* sum_sq,
                           const ClipArguments& clip, cudaStream_t stream);

// `partial_sums` is fp32 or null: one sum for each tile, those of matrix i from first_partials[i] on. If that list (in
// host memory) is null they are one matrix after the other, which args.sum_sq requires.
void tile_weight_grad(const TileArguments& args, float* partial_sums, const int64_t* first_partials,
                      cudaStream_t stream);

// The number of parts into which tile_weight_grad cuts the tokens of each tile on the current device: the blocks of a
// cluster, if more than 1.
int tile_weight_grad_parts(const TileArguments& args);

void indexed_swap(const MoveArguments& args, cudaStream_t stream);
void indexed_replace(const ReplaceArguments& args, cudaStream_t stream);
void indexed_take(const MoveArguments& args, cudaStream_t stream);
// Writes args.sampled and returns the number of its elements. Called between delta_prepare and delta_encode.
int64_t delta_sample(const DeltaArguments& args, cudaStream_t stream);
// The size of args.progress, which delta_prepare initializes for one delta_encode.
int64_t delta_progress_bytes(const DeltaArguments& args);
void delta_prepare(const DeltaArguments& args, cudaStream_t stream);
// Writes args.bounds of the tensors that are not empty, and all changes if args.capacity is sufficient. If
// args.speculative, does nothing if sample_stride times the changes that delta_sample counted exceeds args.capacity.
void delta_encode(const DeltaArguments& args, cudaStream_t stream);
void delta_apply(const MoveArguments& args, cudaStream_t stream);

}  // namespace sparse_opt::cuda
