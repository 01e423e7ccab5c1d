// Active tiles of weight gradients. A block brings the tile's columns of both operands into shared memory, step by step
// of tokens, and multiplies them there; where few tiles are active it does so for a part of the tokens, and the last
// block of a tile adds up what the others left, in their order.
//
// Bytes, with T tokens, of a tile of n x n in 2-byte operands: 2 x 2 n T from the L2 cache, 4 n^2 written (and read, to
// accumulate; and twice for each part of the tokens). From memory comes what some tile needs of the operands, once, as
// blocks that run together are at about the same token. The floor is the larger of the two over their rates. A product
// has n^2 T multiply-adds, n / 4 for each byte from L2: at 64 that is the cache's time before it is the tensor cores'.
#include <algorithm>
#include <vector>

#include "block_sum.cuh"
#include "dispatch.cuh"
#include "kernels.h"
#include "segment_table.cuh"
#include "tile_product.cuh"

namespace sparse_opt::cuda {
namespace {

constexpr int kSmallTileTable = 4;  // a hook's one weight, or those of an attention layer
#if CUDART_VERSION >= 12010
constexpr int kLargeTileTable = 200;
#else
constexpr int kLargeTileTable = 48;
#endif

template <int Capacity>
struct TileTable {
  const void* grad_outputs[Capacity];
  const void* inputs[Capacity];
  int64_t tokens[Capacity];
  int64_t rows[Capacity];
  int64_t columns[Capacity];
  int64_t first_tile[Capacity];       // in args.tiles
  int64_t first_partial[Capacity];    // in partial_sums
  int32_t first_block[Capacity + 1];  // of each matrix, in this launch: a block for each tile
  int32_t count;
  int64_t block_offset;  // this launch's first block within the call
};

// Leaves this block's sums, and says whether it is the last of its tile; if so, `sums` are those of all, added in
// order.
template <typename Sums, int Threads>
__device__ __forceinline__ bool meet(Sums& sums, float* meeting, int* counter, int splits, int split) {
  float4* all = reinterpret_cast<float4*>(meeting) + threadIdx.x;
  constexpr int kQuads = Sums::kPairs / 2;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const float2 a = sums.pair(2 * q), b = sums.pair(2 * q + 1);
    __stcg(all + (split * kQuads + q) * Threads, make_float4(a.x, a.y, b.x, b.y));
  }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == splits - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  constexpr int kTogether = 8;  // loads that do not wait for each other
  static_assert(kQuads % kTogether == 0);
#pragma unroll
  for (int first = 0; first < kQuads; first += kTogether) {
    float4 sum[kTogether] = {};
    for (int s = 0; s < splits; ++s) {
      float4 part[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; ++q) part[q] = __ldcg(all + (s * kQuads + first + q) * Threads);
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        sum[q].x += part[q].x;
        sum[q].y += part[q].y;
        sum[q].z += part[q].z;
        sum[q].w += part[q].w;
      }
    }
#pragma unroll
    for (int q = 0; q < kTogether; ++q) {
      sums.set_pair(2 * (first + q), {sum[q].x, sum[q].y});
      sums.set_pair(2 * (first + q) + 1, {sum[q].z, sum[q].w});
    }
  }
  return true;
}

struct Stored {
  float squares = 0.0f;
  bool not_finite = false;
};

template <typename Out>
struct alignas(2 * sizeof(Out)) OutPair {
  Out values[2];
};

// Two neighbours go as one word wherever they may: four threads then write a sector.
template <typename Out, int Tile, typename Sums>
__device__ __forceinline__ Stored store_tile(const Sums& sums, const TileArguments& args, const int64_t* tile,
                                             int64_t rows, int64_t columns) {
  const int64_t first_row = tile[0], first_column = tile[1], stride = tile[3];
  const int height = static_cast<int>(rows - first_row < Tile ? rows - first_row : Tile);
  const int width = static_cast<int>(columns - first_column < Tile ? columns - first_column : Tile);
  Out* out = static_cast<Out*>(args.out) + tile[2];
  const bool in_pairs = reinterpret_cast<uintptr_t>(out) % sizeof(OutPair<Out>) == 0 && (stride | width) % 2 == 0;
  const float scale = args.scale != nullptr ? *args.scale : 1.0f;
  Stored stored;
#pragma unroll
  for (int p = 0; p < Sums::kPairs; ++p) {
    const int row = sums.row(p), column = sums.column(p);
    Out* to = out + row * stride + column;
    const bool inside[2] = {row < height && column < width, row < height && column + 1 < width};
    const float2 pair = sums.pair(p);
    float g[2] = {pair.x, pair.y};
    OutPair<Out> held = {};
    if (args.accumulate && in_pairs && inside[0]) held = *reinterpret_cast<const OutPair<Out>*>(to);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (args.scale != nullptr) g[k] = g[k] * scale;
      if (args.accumulate && !in_pairs && inside[k]) held.values[k] = to[k];
      if (args.accumulate) g[k] = to_float(held.values[k]) + g[k];
      held.values[k] = from_float<Out>(g[k]);
      if (!in_pairs && inside[k]) to[k] = held.values[k];
      const float value = inside[k] ? to_float(held.values[k]) : 0.0f;
      stored.squares += value * value;
      stored.not_finite = stored.not_finite || (float_bits(value) & 0x7f800000u) == 0x7f800000u;
    }
    if (in_pairs && inside[0]) *reinterpret_cast<OutPair<Out>*>(to) = held;
  }
  return stored;
}

template <typename T, int Tile, bool Aligned, int Capacity>
__global__ void __launch_bounds__(TileShape<T, Tile>::kThreads)
    tile_weight_grad_kernel(const __grid_constant__ TileTable<Capacity> table,
                            const __grid_constant__ TileArguments args, const __grid_constant__ TileScratch scratch,
                            float* partial_sums) {
  using Shape = TileShape<T, Tile>;
  extern __shared__ __align__(1024) char stages[];  // as wgmma's swizzle wants them
  const int block = static_cast<int>(blockIdx.x), split = static_cast<int>(blockIdx.y);
  int matrix = 0, high = table.count;  // first_block[matrix] <= block < first_block[high]
  while (high - matrix > 1) {
    const int middle = (matrix + high) / 2;
    (table.first_block[middle] <= block ? matrix : high) = middle;
  }
  const int64_t* tile = args.tiles + 4 * (table.first_tile[matrix] + block - table.first_block[matrix]);
  const int64_t first_row = tile[0], first_column = tile[1];
  const int64_t tokens = table.tokens[matrix], rows = table.rows[matrix], columns = table.columns[matrix];

  const int64_t all_steps = (tokens + Shape::kStep - 1) / Shape::kStep;
  const int64_t steps_each = (all_steps + scratch.splits - 1) / scratch.splits;
  const int64_t first_step = split * steps_each;
  const int64_t left_steps = all_steps - first_step;
  const int64_t steps = left_steps < steps_each ? left_steps : steps_each;  // may be negative: nothing is left
  const int64_t first_token = first_step * Shape::kStep;

  OperandLoader<T, Tile, Aligned> a(table.grad_outputs[matrix], rows, first_row, first_token);
  OperandLoader<T, Tile, Aligned> b(table.inputs[matrix], columns, first_column, first_token);
  const auto load = [&](int64_t step) {
    if (step < steps) {
      char* stage = stages + step % Shape::kStages * Shape::kStageBytes;
      const int64_t left = tokens - first_token - step * Shape::kStep;
      a.load(stage, left);
      b.load(stage + Shape::kOperandBytes, left);
    }
    commit_copies();
  };
  TileSums<T, Tile> sums;
  constexpr int kAhead = Shape::kStages - 1;
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
  for (int64_t step = 0; step < steps; ++step) {
    wait_for_copies<kAhead - 1>();
    sums.before_step();
    __syncthreads();  // the step is there, and nobody reads the one that makes room for the next
    load(step + kAhead);
    const char* stage = stages + step % Shape::kStages * Shape::kStageBytes;
    sums.add(stage, stage + Shape::kOperandBytes);
  }
  sums.finish();

  const int64_t number = table.block_offset + block;  // of the tile, within the call
  if (scratch.splits > 1) {
    float* meeting = scratch.sums + number * scratch.splits * Tile * Tile;
    if (!meet<TileSums<T, Tile>, Shape::kThreads>(sums, meeting, scratch.counters + number, scratch.splits, split)) {
      return;
    }
  }

  Stored stored;
  switch (args.out_dtype) {  // the same for all: one kernel for each would take minutes to compile
    case DType::kFloat32:
      stored = store_tile<float, Tile>(sums, args, tile, rows, columns);
      break;
    case DType::kBFloat16:
      stored = store_tile<bfloat16, Tile>(sums, args, tile, rows, columns);
      break;
    case DType::kFloat16:
      stored = store_tile<float16, Tile>(sums, args, tile, rows, columns);
      break;
  }
  if (args.found_inf != nullptr && __syncthreads_or(stored.not_finite) && threadIdx.x == 0) {
    *args.found_inf = __int_as_float(0x7f800000);
  }
  if (partial_sums != nullptr) {
    const float total = block_sum<Shape::kThreads>(stored.squares);
    if (threadIdx.x == 0) partial_sums[table.first_partial[matrix] + block - table.first_block[matrix]] = total;
  }
}

template <typename T, int Tile, bool Aligned, int Capacity>
void launch_tables(const TileArguments& args, const TileScratch& scratch, float* partial_sums,
                   const int64_t* first_partials, cudaStream_t stream) {
  using Shape = TileShape<T, Tile>;
  const auto kernel = tile_weight_grad_kernel<T, Tile, Aligned, Capacity>;
  // Without this 48 KiB are allowed. It is a note in the driver's books: nothing waits, and a capture goes on.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) {
    throw std::runtime_error("tile_weight_grad_: " + std::to_string(Shape::kSharedBytes) +
                             " bytes of shared memory were refused: " + cudaGetErrorString(error));
  }
  TileTable<Capacity> table;
  table.block_offset = 0;
  for (int64_t first = 0; first < args.count; first += Capacity) {
    table.count = static_cast<int32_t>(std::min<int64_t>(Capacity, args.count - first));
    table.first_block[0] = 0;
    for (int i = 0; i < table.count; ++i) {
      table.grad_outputs[i] = args.grad_outputs[first + i];
      table.inputs[i] = args.inputs[first + i];
      table.tokens[i] = args.tokens[first + i];
      table.rows[i] = args.rows[first + i];
      table.columns[i] = args.columns[first + i];
      table.first_tile[i] = args.starts[first + i];
      const int64_t blocks = args.ends[first + i] - args.starts[first + i];
      table.first_block[i + 1] = table.first_block[i] + static_cast<int32_t>(blocks);
      const int64_t consecutive = table.block_offset + table.first_block[i];
      table.first_partial[i] = first_partials != nullptr ? first_partials[first + i] : consecutive;
    }
    const auto blocks = static_cast<unsigned>(table.first_block[table.count]);
    if (blocks == 0) continue;
    const dim3 grid(blocks, static_cast<unsigned>(scratch.splits));
    kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(table, args, scratch, partial_sums);
    check_launch("tile_weight_grad_");
    table.block_offset += blocks;
  }
}

template <typename T, int Tile, bool Aligned>
void launch(const TileArguments& args, const TileScratch& scratch, float* partial_sums, const int64_t* first_partials,
            cudaStream_t stream) {
  if (args.count <= kSmallTileTable) {
    launch_tables<T, Tile, Aligned, kSmallTileTable>(args, scratch, partial_sums, first_partials, stream);
  } else {
    launch_tables<T, Tile, Aligned, kLargeTileTable>(args, scratch, partial_sums, first_partials, stream);
  }
}

// Whether every operand's rows are whole 16-byte chunks.
bool aligned(const TileArguments& args) {
  const int64_t vector = 16 / element_size(args.dtype);
  for (int64_t i = 0; i < args.count; ++i) {
    const auto addresses =
        reinterpret_cast<uintptr_t>(args.grad_outputs[i]) | reinterpret_cast<uintptr_t>(args.inputs[i]);
    if (addresses % 16 != 0 || args.rows[i] % vector != 0 || args.columns[i] % vector != 0) return false;
  }
  return true;
}

}  // namespace

// Parts of the tokens pay where tiles are few and each has many steps: what the parts leave for each other is 4 n^2
// bytes twice, and a block waits for the others' at the end. On an H200, one launch, 8192 tokens, in us:
//
//   tiles of 128       5     14     24     38     76    152        of 64     19     58     96    154    308    616
//   whole           83.4   83.9   84.3   84.4   85.3    136              42.3   45.4   48.0   57.0   82.0    174
//   as below        30.3   34.8   39.1   46.9   65.2    127              21.9   32.5   41.6   57.0   82.0    174
//
// Blocks are to run side by side, one of 128 or two of 64 on a multiprocessor. Where they would not even in two parts,
// those of 128 go in three, which leaves a shorter last round; more of either cost up to a third. With 2048 tokens
// parts of tiles of 128 still gain 10 to 20 %, those of 64 nothing; with 1024 all lose.
TileScratch tile_scratch(const TileArguments& args) {
  constexpr int64_t kMostSplits = 8, kLeastTokens = 512;  // of a part
  TileScratch scratch;
  const int64_t tiles = args.active();
  const bool large = args.tile_size == 128;
  int64_t tokens = 0;
  for (int64_t i = 0; i < args.count; ++i) tokens = std::max(tokens, args.tokens[i]);
  if (tiles == 0 || tokens < (large ? 2048 : 4096)) return scratch;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  int64_t splits = std::min({(large ? 1 : 2) * multiprocessors / tiles, tokens / kLeastTokens, kMostSplits});
  if (large && splits < 2 && 2 * tiles <= 3 * multiprocessors && tokens >= 6144) splits = 3;
  scratch.splits = static_cast<int>(std::max<int64_t>(1, splits));
  if (scratch.splits > 1) scratch.sums_size = tiles * scratch.splits * args.tile_size * args.tile_size;
  return scratch;
}

void tile_weight_grad(const TileArguments& args, const TileScratch& scratch, float* partial_sums,
                      const int64_t* first_partials, cudaStream_t stream) {
  const bool is_aligned = aligned(args);
  dispatch_dtype(args.dtype, [&]<typename T>() {
    if (args.tile_size == 64 && is_aligned) launch<T, 64, true>(args, scratch, partial_sums, first_partials, stream);
    if (args.tile_size == 64 && !is_aligned) launch<T, 64, false>(args, scratch, partial_sums, first_partials, stream);
    if (args.tile_size == 128 && is_aligned) launch<T, 128, true>(args, scratch, partial_sums, first_partials, stream);
    if (args.tile_size == 128 && !is_aligned)
      launch<T, 128, false>(args, scratch, partial_sums, first_partials, stream);
  });
  if (args.sum_sq == nullptr) return;
  // Partial sums as a gather would have left them, one for each tile.
  const std::vector<int64_t> starts(args.count, 0);
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < args.count; ++i) ends.push_back((args.ends[i] - args.starts[i]) * kGatherBlock);
  Segments segments;
  segments.count = args.count;
  const std::vector<void*> no_tensors(args.count, nullptr);
  segments.dense = no_tensors.data();
  segments.starts = starts.data();
  segments.ends = ends.data();
  sum_partials(segments, partial_sums, args.sum_sq, stream);
}

}  // namespace sparse_opt::cuda
