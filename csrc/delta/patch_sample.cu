// The sample from which the tables of `tight` and the width of `packed` are computed. It reads a sixteenth of large
// tensors. Nearly all words fall into a few classes, so a warp adds up equal classes before it adds to shared memory.
#include "common/dispatch.cuh"
#include "patch_kernels.h"
#include "whole_tensors.cuh"

namespace sparse_opt::cuda {
namespace {

constexpr int kFrequentSymbols = 8;  // of changes by less than five, which are nearly all changes

struct ClassCounts {
  uint32_t seen[kClasses], changed[kClasses], symbols[kClasses * kFrequentSymbols];
};

__device__ __forceinline__ void add(int64_t* sum, uint32_t count) {
  if (count != 0) atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(count));
}

// One block for each kSampleStride sample blocks of a tensor: it reads the first of them, or all of a small tensor's.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads)
    patch_sample_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                        const __grid_constant__ PatchArguments args, const __grid_constant__ PatchSample sample) {
  static_assert(kSampleBlock % kThreads == 0, "every thread runs as many iterations");
  __shared__ ClassCounts counts;
  for (int c = threadIdx.x; c < kClasses; c += kThreads) counts.seen[c] = counts.changed[c] = 0;
  const bool one_class = args.class_shift >= kWordBits<Word>;
  const int frequent = one_class ? kFrequentSymbols : kClasses * kFrequentSymbols;
  for (int i = threadIdx.x; i < frequent; i += kThreads) counts.symbols[i] = 0;
  __syncthreads();
  const BlockRange range = block_range(table, kSampleBlock * kSampleStride);
  const auto* old_words = static_cast<const Word*>(table.companions[range.segment]);
  const auto* new_words = static_cast<const Word*>(table.dense[range.segment]);
  const bool all = table.ends[range.segment] <= kSampledNumel;
  const int64_t end = all ? range.end : min(range.end, range.begin + kSampleBlock);
  const int symbols = patch_symbols(sizeof(Word)), lane = threadIdx.x % 32;
  // All lanes of a warp run each iteration, as the votes require.
  for (int64_t first = range.begin + threadIdx.x - lane; first < end; first += kThreads) {
    const int64_t k = first + lane;
    const bool has_word = k < end;
    const Word a = has_word ? old_words[k] : Word{0}, b = has_word ? new_words[k] : Word{0};
    const int of = has_word ? class_of(a, args.class_shift) : -1;
    const uint32_t same = one_class ? __ballot_sync(0xffffffffu, has_word) : __match_any_sync(0xffffffffu, of);
    const uint32_t changed = __ballot_sync(0xffffffffu, a != b);
    if (has_word && __ffs(static_cast<int>(same)) - 1 == lane) {
      atomicAdd(counts.seen + of, __popc(same));
      if ((same & changed) != 0) atomicAdd(counts.changed + of, __popc(same & changed));
    }
    if (a != b) {
      const Change<Word> change = change_of(a, b, args.is_float);
      const Symbol symbol = symbol_of(change.magnitude, change.negative);
      if (symbol.symbol < kFrequentSymbols) {
        atomicAdd(counts.symbols + of * kFrequentSymbols + symbol.symbol, 1u);
      } else {
        add(sample.symbols + of * symbols + symbol.symbol, 1);
      }
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kClasses; c += kThreads) {
    add(sample.seen + range.number * kClasses + c, counts.seen[c]);
    add(sample.changed + range.number * kClasses + c, counts.changed[c]);
  }
  for (int i = threadIdx.x; i < frequent; i += kThreads) {
    add(sample.symbols + i / kFrequentSymbols * symbols + i % kFrequentSymbols, counts.symbols[i]);
  }
}

}  // namespace

void patch_sample(const PatchArguments& args, const PatchSample& sample, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_whole_table(args.count, args.new_tensors, args.old_tensors, args.numels, kSampleBlock * kSampleStride,
                         [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                           patch_sample_kernel<Word><<<blocks, kThreads, 0, stream>>>(table, args, sample);
                           check_launch("patch_sample");
                         });
  });
}

}  // namespace sparse_opt::cuda
