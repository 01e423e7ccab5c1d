// Bytes per active element: index 2 or 4, or 4 a run, the compact element read and written; and 64 read and 64 written
// for each 64-byte granule of the dense tensors that the mask touches. Elements that are equal in both are not written.
#include "move.cuh"
#include "swap.h"

namespace sparse_opt::cuda {

void indexed_swap(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kSwap>("indexed_swap_", args, stream);
}

void indexed_take(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kToCompact>("indexed_take_", args, stream);
}

}  // namespace sparse_opt::cuda
