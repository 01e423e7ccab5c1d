// Reads every byte once, which is the bandwidth bound, and writes 16 bytes for each chunk of 64 KiB.
//
// A warp processes a chunk. Four lanes process a block of 1024 bytes, a pair of accumulators each, so a warp has eight
// neighbouring blocks in flight. Lanes exchange nothing until all sums of a chunk are in shared memory. Then every
// group of lanes computes the same chain of scrambles over them: no lane diverges, and other warps use the memory
// meanwhile.
#include "chunk_digests.h"
#include "common/segment_table.cuh"
#include "xxh3.cuh"

namespace sparse_opt::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPairs = xxh3::kAccumulators / 2;  // lanes that share a block
constexpr int kGroups = 32 / kPairs;             // blocks that a warp takes at a time
constexpr int kChunkBlocks = static_cast<int>(kDigestChunk / xxh3::kBlock);
constexpr unsigned kAllLanes = 0xffffffffu;

// Loads 16 bytes with the alignment of Word, with a streaming policy because they are read once.
template <typename Word>
__device__ __forceinline__ xxh3::Pair load_pair(const uint8_t* data) {
  Word words[sizeof(xxh3::Pair) / sizeof(Word)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(xxh3::Pair) / sizeof(Word)); ++i) {
    words[i] = __ldcs(reinterpret_cast<const Word*>(data) + i);
  }
  xxh3::Pair pair;
  memcpy(&pair, words, sizeof(pair));
  return pair;
}

// Calls call.template operator()<Word>() with the widest Word that `data` is aligned to.
template <typename Call>
__device__ __forceinline__ void dispatch_alignment(const uint8_t* data, Call call) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % 16 == 0) {
    call.template operator()<uint4>();
  } else if (address % 4 == 0) {
    call.template operator()<unsigned int>();
  } else if (address % 2 == 0) {
    call.template operator()<unsigned short>();
  } else {
    call.template operator()<unsigned char>();
  }
}

// The amount that the first `stripes` stripes of a block add to a lane's pair. `data` and `key` are those of the lane's
// 16 bytes of the first stripe.
template <typename Word>
__device__ __forceinline__ xxh3::Pair accumulated_block(const uint8_t* data, int stripes, const uint64_t* key) {
  // Stripes whose loads are in flight together, 16 bytes of each for a lane. Fewer of unaligned data, which is rare and
  // takes many instructions.
  constexpr int kTogether = sizeof(Word) == 16 ? 8 : 2;
  constexpr int kUnroll = sizeof(Word) == 16 ? xxh3::kBlockStripes / kTogether : 1;
  xxh3::Pair sum = {0, 0};
#pragma unroll kUnroll
  for (int first = 0; first < xxh3::kBlockStripes; first += kTogether) {
    xxh3::Pair words[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j < stripes) words[j] = load_pair<Word>(data + (first + j) * xxh3::kStripe);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j < stripes) xxh3::accumulate(sum, words[j], {key[first + j], key[first + j + 1]});
    }
  }
  return sum;
}

// Called by a whole warp; all lanes return the same hash. `sums` is the warp's own memory.
__device__ __forceinline__ xxh3::Hash128 hash_long(const uint8_t* data, int64_t size, const uint64_t* secret,
                                                   xxh3::Pair (*sums)[kPairs]) {
  const int lane = threadIdx.x % 32, group = lane / kPairs, pair = lane % kPairs;
  const xxh3::LongShape shape = xxh3::long_shape(size);
  const int blocks = static_cast<int>(shape.blocks);
  dispatch_alignment(data, [&]<typename Word>() {
    const uint8_t* mine = data + group * xxh3::kBlock + pair * sizeof(xxh3::Pair);
    const uint64_t* key = secret + 2 * pair;
#pragma unroll 1
    for (int first = 0; first <= blocks; first += kGroups) {
      const int block = first + group;
      if (first + kGroups <= blocks) {  // whole blocks, without conditions on loads and sums
        sums[block][pair] = accumulated_block<Word>(mine + first * xxh3::kBlock, xxh3::kBlockStripes, key);
      } else if (block <= blocks) {
        const int stripes = block < blocks ? xxh3::kBlockStripes : shape.stripes;
        sums[block][pair] = accumulated_block<Word>(mine + first * xxh3::kBlock, stripes, key);
      }
    }
  });

  const uint8_t* last = data + size - xxh3::kStripe + pair * sizeof(xxh3::Pair);
  xxh3::Pair words;  // loaded before the chain, which hides the latency
  dispatch_alignment(last, [&]<typename Word>() { words = load_pair<Word>(last); });
  __syncwarp();

  const auto [first_key, second_key] =
      xxh3::Pair{secret[xxh3::kSecretScramble / 8 + 2 * pair], secret[xxh3::kSecretScramble / 8 + 2 * pair + 1]};
  xxh3::Pair acc = xxh3::first_accumulators(pair);
#pragma unroll 4
  for (int block = 0; block < blocks; ++block) {
    const xxh3::Pair sum = sums[block][pair];
    acc = {xxh3::scramble(acc.first + sum.first, first_key), xxh3::scramble(acc.second + sum.second, second_key)};
  }
  acc.first += sums[blocks][pair].first;
  acc.second += sums[blocks][pair].second;
  const int key = xxh3::kSecretLastStripe + pair * static_cast<int>(sizeof(xxh3::Pair));
  xxh3::accumulate(acc, words, {xxh3::secret_at(secret, key), xxh3::secret_at(secret, key + 8)});

  uint64_t low = xxh3::merged(acc, pair, secret, xxh3::kSecretMergeLow);
  uint64_t high = xxh3::merged(acc, pair, secret, xxh3::kSecretMergeHigh);
#pragma unroll
  for (int other = 1; other < kPairs; other *= 2) {
    low += __shfl_xor_sync(kAllLanes, low, other);
    high += __shfl_xor_sync(kAllLanes, high, other);
  }
  return xxh3::finished(low, high, size);
}

template <int Capacity>
__global__ void __launch_bounds__(kWarps * 32)
    chunk_digests_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                         const __grid_constant__ xxh3::Secret secret_words, xxh3::Pair* digests) {
  __shared__ uint64_t secret[xxh3::kSecretWords];
  __shared__ xxh3::Pair sums[kWarps][kChunkBlocks][kPairs];
  if (threadIdx.x < xxh3::kSecretWords) secret[threadIdx.x] = secret_words.words[threadIdx.x];
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunk = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (chunk >= table.first_block[table.count]) return;

  const BlockRange range = block_range(table, kDigestChunk, chunk);
  const uint8_t* data = static_cast<const uint8_t*>(table.dense[range.segment]) + range.begin;
  const int64_t size = range.end - range.begin;
  const bool writes = threadIdx.x % 32 == 0;
  xxh3::Hash128 hash;
  if (size > xxh3::kLongestShort) {
    hash = hash_long(data, size, secret, sums[warp]);
  } else if (writes) {
    hash = xxh3::hash_short(data, size, secret);
  }
  if (writes) digests[table.block_offset + chunk] = xxh3::canonical(hash);
}

}  // namespace

void chunk_digests(const ChunkDigestArguments& args, cudaStream_t stream) {
  for_each_whole_table(args.count, args.tensors, nullptr, args.sizes, kDigestChunk,
                       [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned chunks) {
                         chunk_digests_kernel<<<(chunks + kWarps - 1) / kWarps, kWarps * 32, 0, stream>>>(
                             table, xxh3::kSecret, reinterpret_cast<xxh3::Pair*>(args.digests));
                         check_launch("chunk_digests");
                       });
}

}  // namespace sparse_opt::cuda
