// The launchers of indexed_swap_, indexed_replace_, delta_apply_ and, for delta logs, indexed_take_.
#pragma once

#include "common/arguments.h"

namespace sparse_opt {

// Moves bits between dense[indices] and a compact buffer.
struct MoveArguments {
  Segments segments;
  void* compact = nullptr;  // [nnz]
  int element_size = 0;     // 1, 2, 4 or 8
};

// Writes `after`, rounded to dense_dtype, to dense[indices] where its bits differ from those of `before`, which dense
// holds. Each of the two is [nnz] of dense_dtype or fp32.
struct ReplaceArguments {
  Segments segments;
  DType dense_dtype = DType::kFloat32;
  DType before_dtype = DType::kFloat32;
  DType after_dtype = DType::kFloat32;
  const void* before = nullptr;
  const void* after = nullptr;
};

namespace cpu {

void indexed_swap(const MoveArguments& args, ParallelFor parallel_for);
void indexed_replace(const ReplaceArguments& args, ParallelFor parallel_for);
void indexed_take(const MoveArguments& args, ParallelFor parallel_for);
void delta_apply(const MoveArguments& args, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

void indexed_swap(const MoveArguments& args, cudaStream_t stream);
void indexed_replace(const ReplaceArguments& args, cudaStream_t stream);
void indexed_take(const MoveArguments& args, cudaStream_t stream);
void delta_apply(const MoveArguments& args, cudaStream_t stream);

}  // namespace cuda

}  // namespace sparse_opt
