// For each tile of S x S elements and each token: 2 S operands are read, S^2 products computed; out is written once
// (and read, to accumulate). From a few tokens on the products take the time. On one Zen 4 core 26 tiles of 64 of a
// 2048 x 2048 matrix, 1024 tokens, take 3.3 ms in bf16, 3.6 in fp32 and in fp16; a torch.mm for each tile 2.2, 4.1 and
// 36; torch's whole product and a gather 41, 88 and 1440.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "common/arguments.h"
#include "common/multiversion.h"
#include "common/scalar_types.h"
#include "tiles.h"

namespace sparse_opt::cpu {
namespace {

// A strip of a tile is kStrip rows of kSide columns. Up to kSide consecutive rows are computed together, so that their
// inputs are converted once. An element's sum depends on its own products and the order of the tokens only, so neither
// strips nor threads change its bits.
constexpr int64_t kStrip = 16;
constexpr int64_t kSide = 64;
constexpr int64_t kLanes = 16;    // neighbouring columns, or rows, in a group of a packed block
constexpr int64_t kTokens = 128;  // of a packed block: one group of lanes takes 8 KiB
constexpr int64_t kRows = 4;      // of a register block: kRows x kLanes sums in half of AVX2's registers
constexpr int64_t kPieceProducts = int64_t{1} << 18;  // a smaller piece is not worth another thread
static_assert(kStrip == kLanes && kSide % kLanes == 0 && kLanes % kRows == 0);

// [kSide / kLanes groups][kTokens][kLanes]
using Packed = float[kSide / kLanes][kTokens][kLanes];
using Sums = float[kSide][kSide];

template <typename T>
inline void pack_loop(const T* __restrict source, int64_t row_size, int64_t tokens, int64_t n, Packed& packed) {
  for (int64_t group = 0; group * kLanes < n; ++group) {
    const T* __restrict from = source + group * kLanes;
    const int64_t lanes = std::min(kLanes, n - group * kLanes);
    if (lanes == kLanes) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t k = 0; k < kLanes; ++k) packed[group][t][k] = to_float(from[t * row_size + k]);
      }
    } else {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t k = 0; k < kLanes; ++k) packed[group][t][k] = k < lanes ? to_float(from[t * row_size + k]) : 0.0f;
      }
    }
  }
}

// packed[k / kLanes][t][k % kLanes] = fp32 of source[t][first + k] for k in [0, n), and 0 up to a whole group.
SPARSE_OPT_MULTIVERSION
void pack(DType dtype, const void* source, int64_t row_size, int64_t first, int64_t tokens, int64_t n, Packed& packed) {
  switch (dtype) {
    case DType::kFloat32:
      pack_loop(static_cast<const float*>(source) + first, row_size, tokens, n, packed);
      break;
    case DType::kBFloat16:
      pack_loop(static_cast<const bfloat16*>(source) + first, row_size, tokens, n, packed);
      break;
    case DType::kFloat16:
      pack_loop(static_cast<const float16*>(source) + first, row_size, tokens, n, packed);
      break;
  }
}

// sums[r][c] += sum over the block's tokens of g[t][r] * x[t][c].
SPARSE_OPT_MULTIVERSION
void add_products(const Packed& g, const Packed& x, int64_t tokens, int64_t rows, int64_t columns, Sums& sums) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    const float (*__restrict right)[kLanes] = x[column / kLanes];
    for (int64_t row = 0; row < rows; row += kRows) {
      const float (*__restrict left)[kLanes] = g[row / kLanes];
      const int64_t lane = row % kLanes;
      float block[kRows][kLanes] = {};
      for (int64_t token = 0; token < tokens; ++token) {
        // Otherwise GCC 12 loads the rows' factors as one vector and permutes it: 27e9 instead of 47e9 products a
        // second on one Zen 4 core with AVX-512.
        int64_t t = token;
        asm("" : "+r"(t));
#pragma GCC unroll 4
        for (int64_t r = 0; r < kRows; ++r) {
          const float factor = left[t][lane + r];
#pragma GCC unroll 16
          for (int64_t k = 0; k < kLanes; ++k) block[r][k] += factor * right[t][k];
        }
      }
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t k = 0; k < kLanes; ++k) sums[row + r][column + k] += block[r][k];
      }
    }
  }
}

// Statistics of a strip: fp64 sums of fp32 squares in a fixed order, and 1 if a stored value is not finite.
struct Stored {
  double squares[kLanes] = {};
  uint32_t not_finite[kLanes] = {};
};

template <typename T>
inline void store_loop(const float* __restrict sums, int64_t n, const float* scale, bool accumulate, T* __restrict out,
                       Stored& stored) {
  alignas(64) float g[kSide];
  for (int64_t k = 0; k < n; ++k) g[k] = sums[k];
  if (scale != nullptr) {
    for (int64_t k = 0; k < n; ++k) g[k] = g[k] * *scale;
  }
  if (accumulate) {
    for (int64_t k = 0; k < n; ++k) g[k] = to_float(out[k]) + g[k];
  }
  for (int64_t k = 0; k < n; ++k) {
    const T value = from_float<T>(g[k]);
    out[k] = value;
    g[k] = to_float(value);
  }
  const auto note = [&](int64_t k, int64_t lane) {
    const float square = g[k] * g[k];
    stored.squares[lane] += static_cast<double>(square);
    stored.not_finite[lane] |= (float_bits(g[k]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  };
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) note(k + lane, lane);
  }
  for (int64_t lane = 0; k + lane < n; ++lane) note(k + lane, lane);
}

// One row of a strip: out[slot + k] for k in [0, n), kSide at most.
SPARSE_OPT_MULTIVERSION
void store(const TileArguments& args, const float* sums, int64_t slot, int64_t n, Stored& stored) {
  switch (args.out_dtype) {
    case DType::kFloat32:
      store_loop(sums, n, args.scale, args.accumulate, static_cast<float*>(args.out) + slot, stored);
      break;
    case DType::kBFloat16:
      store_loop(sums, n, args.scale, args.accumulate, static_cast<bfloat16*>(args.out) + slot, stored);
      break;
    case DType::kFloat16:
      store_loop(sums, n, args.scale, args.accumulate, static_cast<float16*>(args.out) + slot, stored);
      break;
  }
}

// The strips of a call, numbered matrix by matrix, tile by tile, and within a tile of 128 by halves of its columns.
class Strips {
 public:
  explicit Strips(const TileArguments& args)
      : args_(args), strips_per_side_(args.tile_size / kStrip), per_tile_(strips_per_side_ * (args.tile_size / kSide)) {
    for (int64_t i = 0; i < args.count; ++i)
      first_.push_back(first_.back() + (args.ends[i] - args.starts[i]) * per_tile_);
  }

  int64_t count() const { return first_.back(); }
  int64_t first(int64_t matrix) const { return first_[matrix]; }

  // Computes strips [begin, end), or as many of them as can be computed together, and returns the next strip. Writes
  // the sum of squares of each to squares[strip] if that is not null, and sets not_finite if a value is not finite.
  int64_t run(int64_t begin, int64_t end, double* squares, std::atomic<bool>& not_finite) const {
    const int64_t matrix = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
    const int64_t in_matrix = begin - first_[matrix], in_tile = in_matrix % per_tile_;
    const int64_t* tile = args_.tiles + (args_.starts[matrix] + in_matrix / per_tile_) * 4;
    const int64_t strip = in_tile % strips_per_side_;
    const int64_t strips = std::min({end - begin, strips_per_side_ - strip, kSide / kStrip});
    const int64_t skip_rows = strip * kStrip, skip_columns = in_tile / strips_per_side_ * kSide;
    const TilePlace place = place_of(args_, tile[0], args_.rows[matrix], args_.tokens[matrix]);
    const int64_t row = place.row + skip_rows, column = tile[1] + skip_columns;
    const int64_t rows = std::min(args_.rows[matrix] - row, strips * kStrip);
    const int64_t columns = std::min(args_.columns[matrix] - column, kSide);
    if (rows > 0 && columns > 0) {
      alignas(64) Sums sums;
      add_up(matrix, place, row, rows, column, columns, sums);
      for (int64_t s = 0; s * kStrip < rows; ++s) {
        Stored stored;
        for (int64_t r = s * kStrip; r < std::min(rows, (s + 1) * kStrip); ++r) {
          store(args_, sums[r], tile[2] + (skip_rows + r) * tile[3] + skip_columns, columns, stored);
        }
        if (squares != nullptr) {
          for (double lane : stored.squares) squares[begin + s] += lane;
        }
        for (uint32_t lane : stored.not_finite) {
          if (lane != 0) not_finite.store(true, std::memory_order_relaxed);
        }
      }
    }
    return begin + strips;
  }

 private:
  void add_up(int64_t matrix, const TilePlace& place, int64_t row, int64_t rows, int64_t column, int64_t columns,
              Sums& sums) const {
    alignas(64) Packed g, x;
    std::memset(sums, 0, sizeof(Sums));
    const int64_t all_rows = args_.rows[matrix], all_columns = args_.columns[matrix];
    const int64_t size = element_size(args_.dtype);
    const int64_t end = place.first_token + place.tokens;
    for (int64_t token = place.first_token; token < end; token += kTokens) {
      const int64_t tokens = std::min(kTokens, end - token);
      const char* grad_outputs = static_cast<const char*>(args_.grad_outputs[matrix]) + token * all_rows * size;
      const char* inputs = static_cast<const char*>(args_.inputs[matrix]) + token * all_columns * size;
      pack(args_.dtype, grad_outputs, all_rows, row, tokens, rows, g);
      pack(args_.dtype, inputs, all_columns, column, tokens, columns, x);
      add_products(g, x, tokens, rows, columns, sums);
    }
  }

  const TileArguments& args_;
  int64_t strips_per_side_, per_tile_;
  std::vector<int64_t> first_ = {0};  // [count + 1]
};

}  // namespace

void tile_weight_grad(const TileArguments& args, ParallelFor parallel_for) {
  const Strips strips(args);
  std::vector<double> squares(args.sum_sq != nullptr ? strips.count() : 0);
  std::atomic<bool> not_finite = false;
  const int64_t tokens = std::max<int64_t>(1, args.most_tokens());
  const int64_t per_piece = std::max<int64_t>(1, kPieceProducts / (kStrip * kSide * tokens));
  parallel_for((strips.count() + per_piece - 1) / per_piece, [&](int64_t first, int64_t last) {
    const int64_t end = std::min(last * per_piece, strips.count());
    for (int64_t strip = first * per_piece; strip < end;) {
      strip = strips.run(strip, end, args.sum_sq != nullptr ? squares.data() : nullptr, not_finite);
    }
  });
  if (args.sum_sq != nullptr) {
    for (int64_t i = 0; i < args.count; ++i) {
      double sum = 0.0;
      for (int64_t strip = strips.first(i); strip < strips.first(i + 1); ++strip) sum += squares[strip];
      args.sum_sq[i] = static_cast<float>(sum);
    }
  }
  if (not_finite && args.found_inf != nullptr) *args.found_inf = std::numeric_limits<float>::infinity();
}

}  // namespace sparse_opt::cpu
