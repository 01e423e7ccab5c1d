// Active tiles of weight gradients. A block loads the tile's columns of both operands into shared memory, a step of
// tokens at a time, and multiplies them there. If few tiles are active, the tokens of a tile are split between the
// blocks of a cluster, which then add up their sums through distributed shared memory, each block a part of the
// columns.
//
// Bytes for a tile of n x n, T tokens and 2-byte operands: 2 x 2 n T read from the L2 cache, 4 n^2 written (and read,
// to accumulate). The parts of the operands that any tile needs are read from memory once, because blocks that run
// together are at about the same token. The bandwidth bound is the larger of the two times. A product has n^2 T
// multiply-adds, n / 4 for each byte from L2: tiles of 64 are bound by the cache, not by the tensor cores.
#include <cooperative_groups.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <vector>

#include "common/block_sum.cuh"
#include "common/dispatch.cuh"
#include "common/segment_table.cuh"
#include "gather/gather.h"
#include "tile_product.cuh"
#include "tiles.h"

namespace sparse_opt::cuda {
namespace {

constexpr int kSmallTileTable = 4;  // for the weight of a hook, or those of an attention layer
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
  int32_t first_block[Capacity + 1];  // of each matrix, in this launch: one block for each tile
  int32_t count;
};

// The pairs [first, last) of a thread's sums, which its block stores.
struct PairRange {
  int first, last;
};

constexpr int kMostSplits = 8;  // the portable maximum of a cluster's blocks

// Sums over the blocks of a cluster, through distributed shared memory.
template <typename Sums, int Threads>
struct TileCluster {
  static constexpr int kQuads = Sums::kPairs / 2;
  static constexpr int kBytes = kQuads * Threads * static_cast<int>(sizeof(float4));  // of a block's sums

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Adds up a part of the columns, which it returns, of all blocks' sums, in the order of the blocks. The next barrier
  // of the cluster frees `shared`, of kBytes.
  static __device__ __forceinline__ PairRange cluster_reduce(Sums& sums, void* shared, int splits, int split) {
    const auto cluster = cooperative_groups::this_cluster();
    float4* own = static_cast<float4*>(shared) + threadIdx.x;
    __syncthreads();  // before the operands in `shared` are overwritten
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float2 a = sums.pair(2 * q), b = sums.pair(2 * q + 1);
      own[q * Threads] = make_float4(a.x, a.y, b.x, b.y);
    }
    const float4* others[kMostSplits];
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s) others[s] = s < splits ? cluster.map_shared_rank(own, s) : own;
    cluster.sync();
    const int first = split * kQuads / splits, last = (split + 1) * kQuads / splits;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q < first || q >= last) continue;
      float4 part[kMostSplits];
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        if (s < splits) part[s] = others[s][q * Threads];
      }
      float4 sum = part[0];
#pragma unroll
      for (int s = 1; s < kMostSplits; ++s) {
        if (s >= splits) break;
        sum.x += part[s].x;
        sum.y += part[s].y;
        sum.z += part[s].z;
        sum.w += part[s].w;
      }
      sums.set_pair(2 * q, {sum.x, sum.y});
      sums.set_pair(2 * q + 1, {sum.z, sum.w});
    }
    return {2 * first, 2 * last};
  }

  // The sum of `value` over thread 0 of each block, returned to thread 0 of the first block. Every thread calls it.
  static __device__ __forceinline__ float sum(float value, int splits, int split) {
    __shared__ float values[kMostSplits];
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) *cluster.map_shared_rank(values + split, 0) = value;
    cluster.sync();
    float sum = 0.0f;
    if (threadIdx.x == 0 && split == 0) {
      for (int s = 0; s < splits; ++s) sum += values[s];
    }
    return sum;
  }
#else
  // Before compute capability 9.0 there are no clusters, and no call is split.
  static __device__ PairRange cluster_reduce(Sums&, void*, int, int) { return {0, Sums::kPairs}; }
  static __device__ float sum(float value, int, int) { return value; }
#endif
};

struct Stored {
  float squares = 0.0f;
  bool not_finite = false;
};

template <typename Out>
struct alignas(2 * sizeof(Out)) OutPair {
  Out values[2];
};

// Two neighbours are stored as one word if they are aligned: four threads then write a sector.
template <typename Out, int Tile, typename Sums>
__device__ __forceinline__ Stored store_tile(const Sums& sums, const PairRange& pairs, const TileArguments& args,
                                             const int64_t* tile, int64_t first_row, int64_t rows, int64_t columns) {
  const int64_t first_column = tile[1], stride = tile[3];
  const int height = static_cast<int>(rows - first_row < Tile ? rows - first_row : Tile);
  const int width = static_cast<int>(columns - first_column < Tile ? columns - first_column : Tile);
  Out* out = static_cast<Out*>(args.out) + tile[2];
  const bool in_pairs = reinterpret_cast<uintptr_t>(out) % sizeof(OutPair<Out>) == 0 && (stride | width) % 2 == 0;
  const float scale = args.scale != nullptr ? *args.scale : 1.0f;
  Stored stored;
#pragma unroll
  for (int p = 0; p < Sums::kPairs; ++p) {
    if (p < pairs.first || p >= pairs.last) continue;
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
                            const __grid_constant__ TileArguments args, float* partial_sums) {
  using Shape = TileShape<T, Tile>;
  extern __shared__ __align__(1024) char stages[];  // the alignment of wgmma's swizzle
  const int block = static_cast<int>(blockIdx.x);
  const int split = static_cast<int>(blockIdx.y), splits = static_cast<int>(gridDim.y);
  int matrix = 0, high = table.count;  // first_block[matrix] <= block < first_block[high]
  while (high - matrix > 1) {
    const int middle = (matrix + high) / 2;
    (table.first_block[middle] <= block ? matrix : high) = middle;
  }
  const int64_t* tile = args.tiles + 4 * (table.first_tile[matrix] + block - table.first_block[matrix]);
  const int64_t rows = table.rows[matrix], columns = table.columns[matrix];
  const TilePlace place = place_of(args, tile[0], rows, table.tokens[matrix]);
  const int64_t first_row = place.row, first_column = tile[1], tokens = place.tokens;

  const int64_t all_steps = (tokens + Shape::kStep - 1) / Shape::kStep;
  const int64_t steps_each = (all_steps + splits - 1) / splits;
  const int64_t first_step = split * steps_each;
  const int64_t left_steps = all_steps - first_step;
  const int64_t steps = left_steps < steps_each ? left_steps : steps_each;  // negative if none are left
  const int64_t first_token = first_step * Shape::kStep;

  OperandLoader<T, Tile, Aligned> a(table.grad_outputs[matrix], rows, first_row, place.first_token + first_token);
  OperandLoader<T, Tile, Aligned> b(table.inputs[matrix], columns, first_column, place.first_token + first_token);
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
    __syncthreads();  // the step is complete, and all threads are done with the stage that load() overwrites
    load(step + kAhead);
    const char* stage = stages + step % Shape::kStages * Shape::kStageBytes;
    sums.add(stage, stage + Shape::kOperandBytes);
  }
  sums.finish();

  using Cluster = TileCluster<TileSums<T, Tile>, Shape::kThreads>;
  PairRange pairs{0, TileSums<T, Tile>::kPairs};
  if (splits > 1) pairs = Cluster::cluster_reduce(sums, stages, splits, split);

  Stored stored;
  switch (args.out_dtype) {  // at run time: a kernel for each would take minutes to compile
    case DType::kFloat32:
      stored = store_tile<float, Tile>(sums, pairs, args, tile, first_row, rows, columns);
      break;
    case DType::kBFloat16:
      stored = store_tile<bfloat16, Tile>(sums, pairs, args, tile, first_row, rows, columns);
      break;
    case DType::kFloat16:
      stored = store_tile<float16, Tile>(sums, pairs, args, tile, first_row, rows, columns);
      break;
  }
  if (args.found_inf != nullptr && __syncthreads_or(stored.not_finite) && threadIdx.x == 0) {
    *args.found_inf = __int_as_float(0x7f800000);
  }
  float total = partial_sums != nullptr ? block_sum_in_first_thread<Shape::kThreads>(stored.squares) : 0.0f;
  if (splits > 1) total = Cluster::sum(total, splits, split);  // always: no block may exit while others read its memory
  if (partial_sums != nullptr && threadIdx.x == 0 && split == 0) {
    partial_sums[table.first_partial[matrix] + block - table.first_block[matrix]] = total;
  }
}

void check_call(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which is reported here
  throw std::runtime_error(std::string("tile_weight_grad_: ") + what + ": " + cudaGetErrorString(error));
}

// The number of blocks that a cluster may have on the current device, queried once for each device. 1 if the code was
// compiled for GPUs without clusters, from which the driver may have translated it.
template <auto kKernel>
int most_splits(const cudaLaunchConfig_t& config) {
  static std::array<std::atomic<int>, 64> found;
  int device = 0;
  cudaGetDevice(&device);
  std::atomic<int>& most = found[device % found.size()];
  if (most.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes attributes;
    check_call(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes failed");
    int blocks = 1;
    if (attributes.ptxVersion >= 90) {
      check_call(cudaOccupancyMaxPotentialClusterSize(&blocks, kKernel, &config),
                 "cudaOccupancyMaxPotentialClusterSize failed");
    }
    most.store(std::clamp(blocks, 1, kMostSplits), std::memory_order_relaxed);
  }
  return most.load(std::memory_order_relaxed);
}

// A call is cut into `splits` parts if it has at most most_tiles for each multiprocessor and at least least_tokens.
struct SplitRule {
  int splits;
  double most_tiles;
  int64_t least_tokens;
};

// Splits of the tokens of a tile, which fill the GPU if tiles are few. A multiprocessor holds two blocks with tiles of
// 128, which take one and a half times as long as one, or three with tiles of 64. Clusters of three, and more so of
// five or six, leave multiprocessors unused. Chosen on an H200 with 132 multiprocessors: "Tuning tables" in
// docs/dev/notebook.md. bench/kernels/tiles.py times such calls.
constexpr SplitRule kRules64[] = {{8, 0.3, 2048}, {4, 0.47, 1024}, {3, 0.64, 2048}, {2, 1.0, 2048}};
constexpr SplitRule kRules128[] = {{8, 0.16, 2048}, {4, 0.25, 1024}, {3, 0.31, 1024}, {4, 0.45, 2048},
                                   {2, 0.5, 1024},  {3, 0.64, 2048}, {2, 1.0, 4096},  {3, 1.25, 6144}};

template <int Tile>
int splits_of(const TileArguments& args) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const double tiles = static_cast<double>(args.active()) / multiprocessors;
  const int64_t tokens = args.most_tokens();
  for (const SplitRule& rule : Tile == 64 ? std::span<const SplitRule>(kRules64) : std::span(kRules128)) {
    if (tiles <= rule.most_tiles && tokens >= rule.least_tokens) return rule.splits;
  }
  return 1;
}

// The launch configuration, except for the number of tiles.
template <typename T, int Tile, bool Aligned, int Capacity>
struct TileLaunch {
  using Shape = TileShape<T, Tile>;
  static constexpr auto kKernel = tile_weight_grad_kernel<T, Tile, Aligned, Capacity>;
  static constexpr int kReduceBytes = TileCluster<TileSums<T, Tile>, Shape::kThreads>::kBytes;

  cudaLaunchConfig_t config = {};
  int splits;  // parts of each tile's tokens: the blocks of a cluster

  TileLaunch(const TileArguments& args, cudaStream_t stream) {
    // The default limit is 48 KiB. The call does not synchronize, and is allowed during a capture.
    check_call(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    std::max(Shape::kSharedBytes, kReduceBytes)),
               "setting its shared memory failed");
    config.gridDim = dim3(1, kMostSplits);
    config.blockDim = Shape::kThreads;
    config.dynamicSmemBytes = std::max(Shape::kSharedBytes, kReduceBytes);
    config.stream = stream;
    splits = std::min(splits_of<Tile>(args), most_splits<kKernel>(config));
    if (splits == 1) config.dynamicSmemBytes = Shape::kSharedBytes;
  }
};

template <typename T, int Tile, bool Aligned, int Capacity>
void launch_tables(const TileArguments& args, float* partial_sums, const int64_t* first_partials, cudaStream_t stream) {
  using Launch = TileLaunch<T, Tile, Aligned, Capacity>;
  auto [config, splits] = Launch(args, stream);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(splits), 1};
  if (splits > 1) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }

  TileTable<Capacity> table;
  int64_t done = 0;  // tiles, in launches before this one
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
      table.first_partial[i] = first_partials != nullptr ? first_partials[first + i] : done + table.first_block[i];
    }
    const auto blocks = static_cast<unsigned>(table.first_block[table.count]);
    if (blocks == 0) continue;
    config.gridDim = dim3(blocks, static_cast<unsigned>(splits));
    check_call(cudaLaunchKernelEx(&config, Launch::kKernel, table, args, partial_sums), "the CUDA launch failed");
    done += blocks;
  }
}

// Whether all rows of all operands are whole, aligned 16-byte chunks.
bool aligned(const TileArguments& args) {
  const int64_t vector = 16 / element_size(args.dtype);
  for (int64_t i = 0; i < args.count; ++i) {
    const auto addresses =
        reinterpret_cast<uintptr_t>(args.grad_outputs[i]) | reinterpret_cast<uintptr_t>(args.inputs[i]);
    if (addresses % 16 != 0 || args.rows[i] % vector != 0 || args.columns[i] % vector != 0) return false;
  }
  return true;
}

// Calls call.template operator()<T, Tile, Aligned, Capacity>().
template <typename Call>
void dispatch_tiles(const TileArguments& args, Call call) {
  const auto with_table = [&]<typename T, int Tile, bool Aligned>() {
    args.count <= kSmallTileTable ? call.template operator()<T, Tile, Aligned, kSmallTileTable>()
                                  : call.template operator()<T, Tile, Aligned, kLargeTileTable>();
  };
  const bool is_aligned = aligned(args);
  dispatch_dtype(args.dtype, [&]<typename T>() {
    if (args.tile_size == 64 && is_aligned) with_table.template operator()<T, 64, true>();
    if (args.tile_size == 64 && !is_aligned) with_table.template operator()<T, 64, false>();
    if (args.tile_size == 128 && is_aligned) with_table.template operator()<T, 128, true>();
    if (args.tile_size == 128 && !is_aligned) with_table.template operator()<T, 128, false>();
  });
}

}  // namespace

int tile_weight_grad_parts(const TileArguments& args) {
  int parts = 1;
  dispatch_tiles(args, [&]<typename T, int Tile, bool Aligned, int Capacity>() {
    parts = TileLaunch<T, Tile, Aligned, Capacity>(args, nullptr).splits;
  });
  return parts;
}

void tile_weight_grad(const TileArguments& args, float* partial_sums, const int64_t* first_partials,
                      cudaStream_t stream) {
  dispatch_tiles(args, [&]<typename T, int Tile, bool Aligned, int Capacity>() {
    launch_tables<T, Tile, Aligned, Capacity>(args, partial_sums, first_partials, stream);
  });
  if (args.sum_sq == nullptr) return;
  // One partial sum for each tile, as a gather of one block for each tile writes them.
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < args.count; ++i) ends.push_back((args.ends[i] - args.starts[i]) * kGatherBlock);
  Segments segments;
  segments.count = args.count;
  segments.ends = ends.data();
  sum_partials(segments, partial_sums, args.sum_sq, {}, stream);
}

}  // namespace sparse_opt::cuda
