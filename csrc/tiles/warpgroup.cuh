// Hopper's asynchronous matrix products of a warpgroup (wgmma), whose operands are in shared memory. They exist in code
// for sm_90a, not sm_90: in other code this file is empty.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#include <cstdint>

#include "common/scalar_types.h"

namespace sparse_opt::cuda {

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

}  // namespace sparse_opt::cuda

#endif
