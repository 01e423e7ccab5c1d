// The launchers of tile_weight_grad_.
#pragma once

#include <algorithm>

#include "common/arguments.h"

namespace sparse_opt {

// Tiles of the weight gradients [rows[i], columns[i]] = grad_outputs[i]^T inputs[i], of contiguous operands. A row of
// `tiles` holds a tile's first row, first column, first slot, and the slots from one of its rows to the next. Matrix i
// has tiles [starts[i], ends[i]). Lists are in host memory.
//
// With token_offsets, each matrix is a stack of one gradient for each expert, with rows [e * rows[i], (e + 1) *
// rows[i]) of expert e in `tiles`. The tokens are sorted by expert, and those of expert e end before token_offsets[e].
struct TileArguments {
  int64_t count = 0;
  void* const* grad_outputs = nullptr;     // [count], [tokens, rows] each
  void* const* inputs = nullptr;           // [count], [tokens, columns] each
  const int64_t* tokens = nullptr;         // [count]
  const int64_t* rows = nullptr;           // [count]
  const int64_t* columns = nullptr;        // [count]
  const int64_t* starts = nullptr;         // [count]
  const int64_t* ends = nullptr;           // [count]
  const int64_t* tiles = nullptr;          // [tiles, 4], on the device
  const int32_t* token_offsets = nullptr;  // [experts], on the device, may be null
  int64_t experts = 0;
  int tile_size = 0;              // 64 or 128
  DType dtype = DType::kFloat32;  // of grad_outputs and inputs
  DType out_dtype = DType::kFloat32;
  void* out = nullptr;           // [nnz]
  const float* scale = nullptr;  // [1], may be null
  bool accumulate = false;
  float* sum_sq = nullptr;     // [count], may be null
  float* found_inf = nullptr;  // [1], may be null

  int64_t active() const {
    int64_t n = 0;
    for (int64_t i = 0; i < count; ++i) n += ends[i] - starts[i];
    return n;
  }
  // The most tokens that tiles of a matrix have, on average over the experts.
  int64_t most_tokens() const {
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, tokens[i]);
    return experts > 0 ? most / experts : most;
  }
};

// Where the products of a tile are: the row of its matrix or, with token_offsets, of its expert; and its tokens.
struct TilePlace {
  int64_t row, first_token, tokens;
};

SPARSE_OPT_HOST_DEVICE TilePlace place_of(const TileArguments& args, int64_t row, int64_t rows, int64_t tokens) {
  if (args.token_offsets == nullptr) return {row, 0, tokens};
  const int64_t expert = row / rows;
  const int64_t first = expert > 0 ? args.token_offsets[expert - 1] : 0, end = args.token_offsets[expert];
  return {row - expert * rows, first, (end < tokens ? end : tokens) - first};
}

namespace cpu {

void tile_weight_grad(const TileArguments& args, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

// `partial_sums` is fp32 or null: one sum for each tile, those of matrix i from first_partials[i] on. If that list (in
// host memory) is null they are one matrix after the other, which args.sum_sq requires.
void tile_weight_grad(const TileArguments& args, float* partial_sums, const int64_t* first_partials,
                      cudaStream_t stream);

// The number of parts into which tile_weight_grad cuts the tokens of each tile on the current device: the blocks of a
// cluster, if more than 1.
int tile_weight_grad_parts(const TileArguments& args);

}  // namespace cuda

}  // namespace sparse_opt
