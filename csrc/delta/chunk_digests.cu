// Reads every byte once, which is the bandwidth bound, and writes 16 bytes for each chunk of 64 KiB.
//
// A warp processes a chunk. Four lanes process a block of 1024 bytes, a pair of accumulators each, so a warp has eight
// neighbouring blocks in flight. Lanes exchange nothing until all sums of a chunk are in shared memory. Then every
// group of lanes computes the same chain of scrambles over them: no lane diverges, and other warps use the memory
// meanwhile.
#include <bit>
#include <cstdint>
#include <cstring>

#include "common/segment_table.cuh"
#include "delta_codec.h"

// XXH3 of 128 bits with the default secret and seed 0.
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
//
// A long input is cut into blocks of 16 stripes of 64 bytes. The amount that a stripe adds to the accumulators does not
// depend on their values, so the stripes of a block can be added in any order and by any thread; only the scrambles at
// the ends of blocks form a chain. Accumulators 2 i and 2 i + 1 are independent of the other six.
namespace sparse_opt::xxh3 {

static_assert(std::endian::native == std::endian::little, "words are read in the byte order of memory");

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9, kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr int64_t kLongestShort = 240;  // bytes; longer inputs are cut into blocks
constexpr int kStripe = 64;             // bytes
constexpr int kBlockStripes = 16;
constexpr int kBlock = kBlockStripes * kStripe;
constexpr int kAccumulators = 8;

constexpr int kSecretWords = 24;
struct Secret {
  uint64_t words[kSecretWords];
};
constexpr Secret kSecret = {{
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
}};

// Bytes of the secret at which a part of it begins. Stripe i of a block is keyed from word i on.
constexpr int kSecretScramble = 128, kSecretLastStripe = 121, kSecretMergeLow = 11, kSecretMergeHigh = 117;
constexpr int kSecretMiddle = 3, kSecretMiddleEnd = 103;

struct Hash128 {
  uint64_t low, high;
};

// Two neighbouring accumulators, the first of even number.
struct alignas(16) Pair {
  uint64_t first, second;
};

__device__ __forceinline__ uint64_t read32(const uint8_t* data) {
  uint32_t word;
  memcpy(&word, data, sizeof(word));
  return word;
}

__device__ __forceinline__ uint64_t read64(const uint8_t* data) {
  uint64_t word;
  memcpy(&word, data, sizeof(word));
  return word;
}

// The 8 bytes of the secret at any byte.
__device__ __forceinline__ uint64_t secret_at(const uint64_t* secret, int byte) {
  const int shift = byte % 8 * 8;
  const uint64_t low = secret[byte / 8] >> shift;
  return shift == 0 ? low : low | secret[byte / 8 + 1] << (64 - shift);
}

__device__ __forceinline__ uint32_t swap32(uint32_t x) {
  return x << 24 | (x << 8 & 0xff0000u) | (x >> 8 & 0xff00u) | x >> 24;
}

__device__ __forceinline__ uint64_t swap64(uint64_t x) {
  return uint64_t{swap32(static_cast<uint32_t>(x))} << 32 | swap32(static_cast<uint32_t>(x >> 32));
}

__device__ __forceinline__ uint64_t multiply32(uint64_t a, uint64_t b) {
  return uint64_t{static_cast<uint32_t>(a)} * static_cast<uint32_t>(b);
}

__device__ __forceinline__ Hash128 multiply64(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

__device__ __forceinline__ uint64_t folded_product(uint64_t a, uint64_t b) {
  const Hash128 product = multiply64(a, b);
  return product.low ^ product.high;
}

__device__ __forceinline__ uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kPrimeMx1;
  return x ^ x >> 32;
}

// That of XXH64, for the shortest inputs.
__device__ __forceinline__ uint64_t avalanche_xxh64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64_2;
  x = (x ^ x >> 29) * kPrime64_3;
  return x ^ x >> 32;
}

__device__ __forceinline__ Hash128 hash_of_none(const uint64_t* secret) {
  return {avalanche_xxh64(secret[8] ^ secret[9]), avalanche_xxh64(secret[10] ^ secret[11])};
}

__device__ __forceinline__ Hash128 hash_1_to_3(const uint8_t* data, int64_t size, const uint64_t* secret) {
  const uint32_t low = uint32_t{data[0]} << 16 | uint32_t{data[size >> 1]} << 24 | uint32_t{data[size - 1]} |
                       static_cast<uint32_t>(size) << 8;
  const uint32_t swapped = swap32(low), high = swapped << 13 | swapped >> 19;
  const auto key = [&](int word) { return (secret[word] ^ secret[word] >> 32) & 0xffffffff; };
  return {avalanche_xxh64(low ^ key(0)), avalanche_xxh64(high ^ key(1))};
}

__device__ __forceinline__ Hash128 hash_4_to_8(const uint8_t* data, int64_t size, const uint64_t* secret) {
  const uint64_t word = read32(data) | read32(data + size - 4) << 32;
  Hash128 hash = multiply64(word ^ secret[2] ^ secret[3], kPrime64_1 + (static_cast<uint64_t>(size) << 2));
  hash.high += hash.low << 1;
  hash.low ^= hash.high >> 3;
  hash.low = (hash.low ^ hash.low >> 35) * kPrimeMx2;
  hash.low ^= hash.low >> 28;
  hash.high = avalanche(hash.high);
  return hash;
}

__device__ __forceinline__ Hash128 hash_9_to_16(const uint8_t* data, int64_t size, const uint64_t* secret) {
  const uint64_t first = read64(data), last = read64(data + size - 8);
  Hash128 mixed = multiply64(first ^ last ^ secret[4] ^ secret[5], kPrime64_1);
  mixed.low += static_cast<uint64_t>(size - 1) << 54;
  const uint64_t keyed = last ^ secret[6] ^ secret[7];
  mixed.high += (keyed & 0xffffffff00000000) + multiply32(keyed, kPrime32_2);
  mixed.low ^= swap64(mixed.high);
  Hash128 hash = multiply64(mixed.low, kPrime64_2);
  hash.high += mixed.high * kPrime64_2;
  return {avalanche(hash.low), avalanche(hash.high)};
}

// Adds 16 bytes to each of two accumulators, with 32 bytes of the secret from `key` on.
__device__ __forceinline__ void mix_32(Hash128& acc, const uint8_t* a, const uint8_t* b, const uint64_t* secret,
                                       int key) {
  const uint64_t a0 = read64(a), a1 = read64(a + 8), b0 = read64(b), b1 = read64(b + 8);
  acc.low += folded_product(a0 ^ secret_at(secret, key), a1 ^ secret_at(secret, key + 8));
  acc.low ^= b0 + b1;
  acc.high += folded_product(b0 ^ secret_at(secret, key + 16), b1 ^ secret_at(secret, key + 24));
  acc.high ^= a0 + a1;
}

// Its loops are not unrolled: they would be most of the kernel's code.
__device__ __forceinline__ Hash128 hash_17_to_240(const uint8_t* data, int64_t size, const uint64_t* secret) {
  Hash128 acc = {static_cast<uint64_t>(size) * kPrime64_1, 0};
  if (size <= 128) {
#pragma unroll 1
    for (int i = static_cast<int>(size - 1) / 32; i >= 0; --i) {
      mix_32(acc, data + 16 * i, data + size - 16 * (i + 1), secret, 32 * i);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) mix_32(acc, data + 32 * i, data + 32 * i + 16, secret, 32 * i);
    acc = {avalanche(acc.low), avalanche(acc.high)};
#pragma unroll 1
    for (int i = 4; 32 * (i + 1) <= size; ++i) {
      mix_32(acc, data + 32 * i, data + 32 * i + 16, secret, kSecretMiddle + 32 * (i - 4));
    }
    mix_32(acc, data + size - 16, data + size - 32, secret, kSecretMiddleEnd);
  }
  const uint64_t high = acc.low * kPrime64_1 + acc.high * kPrime64_4 + static_cast<uint64_t>(size) * kPrime64_2;
  return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

// For at most kLongestShort bytes.
__device__ __forceinline__ Hash128 hash_short(const uint8_t* data, int64_t size, const uint64_t* secret) {
  if (size > 16) return hash_17_to_240(data, size, secret);
  if (size > 8) return hash_9_to_16(data, size, secret);
  if (size > 3) return hash_4_to_8(data, size, secret);
  if (size > 0) return hash_1_to_3(data, size, secret);
  return hash_of_none(secret);
}

// A long input has `blocks` whole blocks, each followed by a scramble, then `stripes` (0 to 15) of a partial block,
// then its last 64 bytes as one more stripe with a key of its own. At least one byte follows the whole blocks.
struct LongShape {
  int64_t blocks;
  int stripes;
};

__device__ __forceinline__ LongShape long_shape(int64_t size) {
  return {(size - 1) / kBlock, static_cast<int>((size - 1) % kBlock) / kStripe};
}

__device__ __forceinline__ Pair first_accumulators(int pair) {
  switch (pair) {
    case 0:
      return {kPrime32_3, kPrime64_1};
    case 1:
      return {kPrime64_2, kPrime64_3};
    case 2:
      return {kPrime64_4, kPrime32_2};
    default:
      return {kPrime64_5, kPrime32_1};
  }
}

// A pair's 16 bytes of a stripe, as two words.
__device__ __forceinline__ void accumulate(Pair& acc, Pair data, Pair key) {
  const uint64_t first = data.first ^ key.first, second = data.second ^ key.second;
  acc.first += data.second + multiply32(first, first >> 32);
  acc.second += data.first + multiply32(second, second >> 32);
}

__device__ __forceinline__ uint64_t scramble(uint64_t acc, uint64_t key) {
  return (acc ^ acc >> 47 ^ key) * kPrime32_1;
}

// The amount that pair `pair` adds to the half of the hash whose part of the secret begins at byte `merge`.
__device__ __forceinline__ uint64_t merged(Pair acc, int pair, const uint64_t* secret, int merge) {
  const int key = merge + 16 * pair;
  return folded_product(acc.first ^ secret_at(secret, key), acc.second ^ secret_at(secret, key + 8));
}

// The hash, from the sums of all pairs' merged().
__device__ __forceinline__ Hash128 finished(uint64_t merged_low, uint64_t merged_high, int64_t size) {
  const auto bytes = static_cast<uint64_t>(size);
  return {avalanche(bytes * kPrime64_1 + merged_low), avalanche(~(bytes * kPrime64_2) + merged_high)};
}

// xxHash's canonical form: 16 bytes, big-endian, as two words to store.
__device__ __forceinline__ Pair canonical(Hash128 hash) {
  return {swap64(hash.high), swap64(hash.low)};
}

}  // namespace sparse_opt::xxh3

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
