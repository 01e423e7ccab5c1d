// The CPU kernels. Work is cut into pieces whose size does not depend on the number of threads, so neither do results.
#pragma once

#include <cstdint>
#include <functional>

#include "arguments.h"

namespace sparse_opt::cpu {

// Runs body(begin, end) over parts of [0, count) on the caller's thread pool, and returns when all are done.
using ParallelFor = void (*)(int64_t count, const std::function<void(int64_t, int64_t)>& body);

// One step of the optimizer that rules/ defines as Rule.
template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, ParallelFor parallel_for);
void masked_grad_gather(const GatherArguments& args, ParallelFor parallel_for);
void tile_weight_grad(const TileArguments& args, ParallelFor parallel_for);
void indexed_swap(const MoveArguments& args, ParallelFor parallel_for);
void indexed_replace(const ReplaceArguments& args, ParallelFor parallel_for);
void indexed_take(const MoveArguments& args, ParallelFor parallel_for);
void delta_mark(const DeltaArguments& args, ParallelFor parallel_for);
void delta_collect(const DeltaArguments& args, ParallelFor parallel_for);
void delta_apply(const MoveArguments& args, ParallelFor parallel_for);

}  // namespace sparse_opt::cpu
