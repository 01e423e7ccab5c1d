// One tile of A^T B, where A is [tokens, rows] and B is [tokens, columns], both row-major: the stages of operands in
// shared memory, a step of tokens each, and their product. 16-bit operands use the tensor cores (wgmma in code for
// sm_90a, else mma.sync, sm_80 and later) with fp32 sums; fp32 operands use fp32 fused multiply-adds.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scalar_types.h"

namespace sparse_opt::cuda {

// Hopper's asynchronous matrix products of a warpgroup (wgmma), whose operands are in shared memory. They exist in code
// for sm_90a, not sm_90.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Makes this thread's writes to shared memory, including finished copies, visible to products after the next barrier.
__device__ __forceinline__ void publish_to_warpgroups() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders earlier accesses to the registers of the sums before the products.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The matrix descriptor of an operand [tokens, columns] of 16-bit words in shared memory: blocks of 64 columns,
// `block_bytes` apart, with 128 bytes for each token, whose 16-byte chunk c is at c ^ (token & 7). Blocks start at
// multiples of 1024.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t block_bytes) {
  constexpr uint64_t kSwizzle128 = 1, kBytesOf8Tokens = 8 * 128;
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(block_bytes >> 4) << 16 | (kBytesOf8Tokens >> 4) << 32 |
         kSwizzle128 << 62;
}

// Adds A^T B of 16 tokens to the warpgroup's sums [64, Columns]: A has 64 columns, B has Columns. A thread's sums 4 j
// to 4 j + 3 are columns 8 j + lane % 4 * 2 and the next one of row warp % 4 * 16 + lane / 4, and the same of the row 8
// below it.
template <typename T, int Columns>
__device__ __forceinline__ void multiply_add_async(float (&sums)[Columns / 2], uint64_t a, uint64_t b);

// The last five operands of wgmma: accumulate; do not negate A or B; A and B are transposed, tokens in rows.
#define SPARSE_OPT_SUMS_8(i)                                                                                    \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SPARSE_OPT_SUMS_32(i) \
  SPARSE_OPT_SUMS_8(i), SPARSE_OPT_SUMS_8(i + 8), SPARSE_OPT_SUMS_8(i + 16), SPARSE_OPT_SUMS_8(i + 24)
#define SPARSE_OPT_MULTIPLY_ADD_ASYNC(T, TYPE)                                                                       \
  template <>                                                                                                        \
  __device__ __forceinline__ void multiply_add_async<T, 64>(float (&sums)[32], uint64_t a, uint64_t b) {             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                         \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 1, 1;"                  \
                 : SPARSE_OPT_SUMS_32(0)                                                                             \
                 : "l"(a), "l"(b));                                                                                  \
  }                                                                                                                  \
  template <>                                                                                                        \
  __device__ __forceinline__ void multiply_add_async<T, 128>(float (&sums)[64], uint64_t a, uint64_t b) {            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                        \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
                 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
                 "%59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, 1, 1;"                                                \
                 : SPARSE_OPT_SUMS_32(0), SPARSE_OPT_SUMS_32(32)                                                     \
                 : "l"(a), "l"(b));                                                                                  \
  }
SPARSE_OPT_MULTIPLY_ADD_ASYNC(bfloat16, "bf16")
SPARSE_OPT_MULTIPLY_ADD_ASYNC(float16, "f16")
#undef SPARSE_OPT_MULTIPLY_ADD_ASYNC
#undef SPARSE_OPT_SUMS_32
#undef SPARSE_OPT_SUMS_8
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory: the first `bytes` are read, the others become 0.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit words, transposed: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<float16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The shape of a block's work: threads, tokens of a step, stages in shared memory. Chosen on an
// H200 with bench/kernels/tiles.py: "Tuning tables" in docs/dev/notebook.md. All fit into 99 KiB, the shared
// memory of a block on GPUs outside of data centers.
template <typename T, int Tile>
struct TileShape {
  static constexpr int kThreads = Tile == 64 ? 128 : 256;
  static constexpr int kStep = sizeof(T) == 4 ? 16 : 64;
  static constexpr int kStages = sizeof(T) == 2 && Tile == 64 ? 4 : 3;
  static constexpr int kVector = 16 / sizeof(T);  // elements of a 16-byte chunk
  static constexpr int kChunks = Tile / kVector;  // of one token's row of one operand
  // 16-bit operands are stored in blocks of 64 columns: a block has 128 bytes for each token.
  static constexpr int kTokenBytes = sizeof(T) == 4 ? Tile * 4 : 128;
  static constexpr int kBlockBytes = kStep * kTokenBytes;
  static constexpr int kOperandBytes = kStep * Tile * sizeof(T);
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kTurns = kStep * kChunks / kThreads;  // chunks of one operand that a thread loads
  static_assert(kStep * kChunks % kThreads == 0 && kThreads % kChunks == 0);

  // The offset of chunk `chunk` of token `token` in an operand's part of a stage. 16-bit chunks have wgmma's 128-byte
  // swizzle, with which ldmatrix, reading one chunk of 8 tokens, accesses 8 different groups of banks.
  static __device__ __forceinline__ int offset(int token, int chunk) {
    if constexpr (sizeof(T) == 4) return token * kTokenBytes + (chunk << 4);
    return chunk / 8 * kBlockBytes + token * kTokenBytes + ((chunk % 8 ^ (token & 7)) << 4);
  }
};

// Loads an operand's columns of the tile into shared memory, one step of tokens at a time; columns past the edge and
// tokens past the last one become 0. Aligned: rows are whole numbers of 16-byte chunks, at 16-byte addresses.
template <typename T, int Tile, bool Aligned>
class OperandLoader {
  using Shape = TileShape<T, Tile>;

 public:
  __device__ __forceinline__ OperandLoader(const void* operand, int64_t row_length, int64_t first, int64_t first_token)
      : row_length_(row_length), chunk_(threadIdx.x % Shape::kChunks), token_(threadIdx.x / Shape::kChunks) {
    const int64_t column = first + chunk_ * Shape::kVector;
    const int64_t valid = row_length - column;
    valid_ = valid >= Shape::kVector ? Shape::kVector : valid > 0 ? static_cast<int>(valid) : 0;
    // A chunk past the edge is not read, but its pointer must be valid.
    source_ = static_cast<const T*>(operand) + (first_token + token_) * row_length + (valid > 0 ? column : 0);
    offset_ = Shape::offset(token_, chunk_);
  }

  // Loads the next step; `left` tokens are left from its first one on.
  __device__ __forceinline__ void load(char* to, int64_t left) {
    constexpr int kApart = Shape::kThreads / Shape::kChunks;  // tokens between a thread's chunks
    static_assert(kApart % 8 == 0, "the swizzle depends on token % 8");
#pragma unroll
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const T* from = source_ + static_cast<int64_t>(turn * kApart) * row_length_;
      char* chunk = to + offset_ + turn * kApart * Shape::kTokenBytes;
      const int valid = token_ + turn * kApart < left ? valid_ : 0;
      if constexpr (Aligned) {
        copy_async(shared_address(chunk), valid > 0 ? from : source_, valid * static_cast<int>(sizeof(T)));
      } else {
        T* words = reinterpret_cast<T*>(chunk);
#pragma unroll
        for (int k = 0; k < Shape::kVector; ++k) words[k] = k < valid ? from[k] : T{};
      }
    }
    source_ += Shape::kStep * row_length_;
  }

 private:
  const T* source_;
  int64_t row_length_;
  int chunk_, token_, valid_, offset_;
};

// The sums of a block's tile, distributed over its threads in pairs of neighbours in a row. Every thread calls
// before_step() ahead of the barrier before a step's add(), and finish() after the last add().
template <typename T, int Tile>
class TileSums;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T, int Tile>
class TileSums {
  using Shape = TileShape<T, Tile>;
  static_assert(Tile / 64 * 128 == Shape::kThreads, "a warpgroup for each 64 rows");
  static_assert(Shape::kBlockBytes % 1024 == 0);

 public:
  static constexpr int kPairs = Tile / 4;

  __device__ __forceinline__ TileSums() {
#pragma unroll
    for (int i = 0; i < Tile / 2; ++i) sums_[i] = 0.0f;
  }

  // Makes the step's operands visible to the tensor cores, and waits until they are done with the previous stage.
  __device__ __forceinline__ void before_step() {
    wait_for_products<0>();
    publish_to_warpgroups();
  }

  // Starts to add the product of a step's operands in shared memory.
  __device__ __forceinline__ void add(const char* a, const char* b) {
    const uint64_t rows = operand_descriptor(shared_address(a) + warpgroup_ * Shape::kBlockBytes, Shape::kBlockBytes);
    const uint64_t columns = operand_descriptor(shared_address(b), Shape::kBlockBytes);
    begin_products();
#pragma unroll
    for (int token = 0; token < Shape::kStep; token += 16) {
      const int chunks = token * Shape::kTokenBytes / 16;
      multiply_add_async<T, Tile>(sums_, rows + chunks, columns + chunks);
    }
    commit_products();
  }

  __device__ __forceinline__ void finish() {
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < Tile / 2; ++i) asm volatile("" : "+f"(sums_[i])::"memory");  // not read before this point
  }

  __device__ __forceinline__ float2 pair(int p) const { return {sums_[2 * p], sums_[2 * p + 1]}; }
  __device__ __forceinline__ void set_pair(int p, float2 value) {
    sums_[2 * p] = value.x;
    sums_[2 * p + 1] = value.y;
  }
  __device__ __forceinline__ int row(int p) const { return threadIdx.x / 32 * 16 + p % 2 * 8 + threadIdx.x % 32 / 4; }
  __device__ __forceinline__ int column(int p) const { return p / 2 * 8 + threadIdx.x % 4 * 2; }

 private:
  float sums_[Tile / 2];
  // Uniform in a warp, which the shuffle tells the compiler, so that descriptors are in uniform registers.
  int warpgroup_ = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
};

#else

template <typename T, int Tile>
class TileSums {
  using Shape = TileShape<T, Tile>;
  // Two rows of warps, each warp with 32 columns.
  static constexpr int kRows = Tile / 2, kColumns = 32;
  static constexpr int kRowBlocks = kRows / 16, kColumnBlocks = kColumns / 8;
  static_assert(2 * (Tile / kColumns) * 32 == Shape::kThreads);

 public:
  static constexpr int kPairs = kRowBlocks * kColumnBlocks * 2;

  __device__ __forceinline__ TileSums() {
    const int warp = threadIdx.x / 32;
    row_ = warp % 2 * kRows;
    column_ = warp / 2 * kColumns;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums_[i][j][k] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void before_step() {}
  __device__ __forceinline__ void finish() {}
  // Adds the product of a step's operands in shared memory.
  __device__ __forceinline__ void add(const char* a, const char* b) {
    const int lane = threadIdx.x % 32, low = lane & 7;
    const int a_token = (lane >> 4) * 8 + low, b_token = (lane >> 3 & 1) * 8 + low;
    const uint32_t a_base = shared_address(a) + row_ / 64 * Shape::kBlockBytes + a_token * Shape::kTokenBytes;
    const uint32_t b_base = shared_address(b) + column_ / 64 * Shape::kBlockBytes + b_token * Shape::kTokenBytes;
    const int a_chunk = row_ % 64 / 8 + (lane >> 3 & 1), b_chunk = column_ % 64 / 8 + (lane >> 4);
#pragma unroll
    for (int token = 0; token < Shape::kStep; token += 16) {
      uint32_t a_words[kRowBlocks][4], b_words[kColumnBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        load_transposed(a_words[i], a_base + token * Shape::kTokenBytes + (((a_chunk + 2 * i) ^ low) << 4));
      }
#pragma unroll
      for (int j = 0; j < kColumnBlocks / 2; ++j) {
        load_transposed(b_words[j], b_base + token * Shape::kTokenBytes + (((b_chunk + 2 * j) ^ low) << 4));
      }
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          multiply_add<T>(sums_[i][j], a_words[i], b_words[j / 2][j % 2 * 2], b_words[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ float2 pair(int p) const {
    const auto& block = sums_[p / (2 * kColumnBlocks)][p / 2 % kColumnBlocks];
    return {block[p % 2 * 2], block[p % 2 * 2 + 1]};
  }
  __device__ __forceinline__ void set_pair(int p, float2 value) {
    auto& block = sums_[p / (2 * kColumnBlocks)][p / 2 % kColumnBlocks];
    block[p % 2 * 2] = value.x;
    block[p % 2 * 2 + 1] = value.y;
  }
  __device__ __forceinline__ int row(int p) const {
    return row_ + p / (2 * kColumnBlocks) * 16 + p % 2 * 8 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ int column(int p) const {
    return column_ + p / 2 % kColumnBlocks * 8 + threadIdx.x % 4 * 2;
  }

 private:
  float sums_[kRowBlocks][kColumnBlocks][4];
  int row_, column_;
};

#endif

template <int Tile>
class TileSums<float, Tile> {
  using Shape = TileShape<float, Tile>;
  // A thread has kRows rows of four columns.
  static constexpr int kRows = Tile * Tile / 4 / Shape::kThreads;

 public:
  static constexpr int kPairs = 2 * kRows;

  __device__ __forceinline__ TileSums()
      : row_(threadIdx.x / (Tile / 4) * kRows), column_(threadIdx.x % (Tile / 4) * 4) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums_[i][k] = 0.0f;
    }
  }

  __device__ __forceinline__ void before_step() {}
  __device__ __forceinline__ void finish() {}

  __device__ __forceinline__ void add(const char* a, const char* b) {
#pragma unroll 4
    for (int token = 0; token < Shape::kStep; ++token) {
      const float* a_row = reinterpret_cast<const float*>(a + token * Shape::kTokenBytes) + row_;
      const float4 right = *reinterpret_cast<const float4*>(b + token * Shape::kTokenBytes + column_ * sizeof(float));
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 left = *reinterpret_cast<const float4*>(a_row + i);
        const float lefts[4] = {left.x, left.y, left.z, left.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sums_[i + k][0] = __fmaf_rn(lefts[k], right.x, sums_[i + k][0]);
          sums_[i + k][1] = __fmaf_rn(lefts[k], right.y, sums_[i + k][1]);
          sums_[i + k][2] = __fmaf_rn(lefts[k], right.z, sums_[i + k][2]);
          sums_[i + k][3] = __fmaf_rn(lefts[k], right.w, sums_[i + k][3]);
        }
      }
    }
  }

  __device__ __forceinline__ float2 pair(int p) const { return {sums_[p / 2][p % 2 * 2], sums_[p / 2][p % 2 * 2 + 1]}; }
  __device__ __forceinline__ void set_pair(int p, float2 value) {
    sums_[p / 2][p % 2 * 2] = value.x;
    sums_[p / 2][p % 2 * 2 + 1] = value.y;
  }
  __device__ __forceinline__ int row(int p) const { return row_ + p / 2; }
  __device__ __forceinline__ int column(int p) const { return column_ + p % 2 * 2; }

 private:
  float sums_[kRows][4];
  int row_, column_;
};

}  // namespace sparse_opt::cuda
