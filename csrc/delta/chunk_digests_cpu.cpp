// Reads every byte once, which is the bandwidth bound, and writes 16 bytes for each chunk of 64 KiB.
#include "chunk_digests_cpu.h"

#include <algorithm>

#include "common/multiversion.h"
#include "xxh3.h"

namespace sparse_opt::cpu {
namespace {

constexpr const uint64_t* kKey = xxh3::kSecret.words;

// All accumulators, as a vector type because GCC 12 does not vectorise the equivalent loops.
using Vector = uint64_t __attribute__((vector_size(xxh3::kStripe)));

// Adds n consecutive stripes, keyed from `key` on, one word further for each. The words that belong to the neighbouring
// accumulator are exchanged once at the end, which saves a permutation in the loop.
inline void accumulate_stripes(uint64_t* acc, const uint8_t* data, int n, const uint64_t* key) {
  Vector products = {}, crossing = {};
  for (int s = 0; s < n; ++s) {
    Vector words, keys;
    std::memcpy(&words, data + s * xxh3::kStripe, sizeof(words));
    std::memcpy(&keys, key + s, sizeof(keys));
    const Vector keyed = words ^ keys;
    products += (keyed & 0xffffffff) * (keyed >> 32);
    crossing += words;
  }
  for (int i = 0; i < xxh3::kAccumulators; ++i) acc[i] += products[i] + crossing[i ^ 1];
}

SPARSE_OPT_MULTIVERSION
void accumulate_long(uint64_t* acc, const uint8_t* data, int64_t size) {
  const auto [blocks, stripes] = xxh3::long_shape(size);
  for (int64_t block = 0; block < blocks; ++block) {
    accumulate_stripes(acc, data + block * xxh3::kBlock, xxh3::kBlockStripes, kKey);
    for (int i = 0; i < xxh3::kAccumulators; ++i) {
      acc[i] = xxh3::scramble(acc[i], kKey[xxh3::kSecretScramble / 8 + i]);
    }
  }
  accumulate_stripes(acc, data + blocks * xxh3::kBlock, stripes, kKey);
  uint64_t last_key[xxh3::kAccumulators];
  for (int i = 0; i < xxh3::kAccumulators; ++i) last_key[i] = xxh3::secret_at(kKey, xxh3::kSecretLastStripe + 8 * i);
  accumulate_stripes(acc, data + size - xxh3::kStripe, 1, last_key);
}

xxh3::Hash128 hash(const uint8_t* data, int64_t size) {
  if (size <= xxh3::kLongestShort) return xxh3::hash_short(data, size, kKey);
  alignas(64) uint64_t acc[xxh3::kAccumulators];
  for (int pair = 0; pair < xxh3::kAccumulators / 2; ++pair) {
    const xxh3::Pair first = xxh3::first_accumulators(pair);
    acc[2 * pair] = first.first;
    acc[2 * pair + 1] = first.second;
  }
  accumulate_long(acc, data, size);
  uint64_t low = 0, high = 0;
  for (int pair = 0; pair < xxh3::kAccumulators / 2; ++pair) {
    const xxh3::Pair last = {acc[2 * pair], acc[2 * pair + 1]};
    low += xxh3::merged(last, pair, kKey, xxh3::kSecretMergeLow);
    high += xxh3::merged(last, pair, kKey, xxh3::kSecretMergeHigh);
  }
  return xxh3::finished(low, high, size);
}

}  // namespace

void chunk_digests(const ChunkDigestArguments& args, ParallelFor parallel_for) {
  parallel_for(args.first_chunk[args.count], [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t tensor =
          std::upper_bound(args.first_chunk, args.first_chunk + args.count + 1, chunk) - 1 - args.first_chunk;
      const int64_t begin = (chunk - args.first_chunk[tensor]) * kDigestChunk;
      const int64_t size = std::min(kDigestChunk, args.sizes[tensor] - begin);
      const xxh3::Pair digest = xxh3::canonical(hash(static_cast<const uint8_t*>(args.tensors[tensor]) + begin, size));
      std::memcpy(args.digests + chunk * kDigestBytes, &digest, kDigestBytes);
    }
  });
}

}  // namespace sparse_opt::cpu
