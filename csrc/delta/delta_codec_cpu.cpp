// delta_mark reads both tensors once, 2 * element size bytes per element, which is the bandwidth bound, and writes one
// bit per element. delta_collect reads the bits, and the cache lines of the new tensors that contain a change.
#include <algorithm>
#include <bit>
#include <cstring>

#include "common/multiversion.h"
#include "delta_codec.h"

namespace sparse_opt::cpu {
namespace {

// First one byte for each word of a run of 512, then one bit: both loops vectorise, a single loop over bits would not.
template <typename Word>
[[gnu::always_inline]] inline int64_t mark_words(const void* old_words, const void* new_words, int64_t n,
                                                 uint64_t* __restrict bits) {
  constexpr int64_t kRun = 512;
  const Word* __restrict a = static_cast<const Word*>(old_words);
  const Word* __restrict b = static_cast<const Word*>(new_words);
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    alignas(64) uint8_t differs[kRun];
    const int64_t size = std::min(kRun, n - begin), numbers = (size + 63) / 64;
    if (size < kRun) std::memset(differs + size, 0, kRun - size);
    for (int64_t k = 0; k < size; ++k) differs[k] = a[begin + k] != b[begin + k] ? 1 : 0;
    for (int64_t k = 0; k < numbers; ++k) {
      uint64_t number = 0;
      for (int j = 0; j < 8; ++j) {
        uint64_t bytes;
        std::memcpy(&bytes, differs + 64 * k + 8 * j, 8);
        // Byte i is 0 or 1, and becomes bit i of the product's top byte.
        number |= (bytes * 0x0102040810204080u >> 56) << 8 * j;
      }
      bits[begin / 64 + k] = number;
      count += std::popcount(number);
    }
  }
  return count;
}

TensorPart delta_block(const DeltaArguments& args, int64_t block) {
  return part_at(args.first_block, args.count, args.numels, kDeltaBlock, block);
}

template <typename Word, typename Index>
void collect(const DeltaArguments& args, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    if (args.block_counts[block] == 0) continue;
    const TensorPart where = delta_block(args, block);
    const Word* source = static_cast<const Word*>(args.new_tensors[where.tensor]) + where.begin;
    const int64_t before = args.running_sums[block] - args.block_counts[block];
    Index* indices = static_cast<Index*>(args.indices) + before;
    Word* values = static_cast<Word*>(args.values) + before;
    for (int64_t k = 0; k < kDeltaBlockBytes; k += 8) {
      uint64_t bits;
      std::memcpy(&bits, args.changed + block * kDeltaBlockBytes + k, 8);
      for (; bits != 0; bits &= bits - 1) {
        const int64_t position = 8 * k + __builtin_ctzll(bits);
        *indices++ = static_cast<Index>(where.begin + position);
        *values++ = source[position];
      }
    }
  }
}

}  // namespace

SPARSE_OPT_MULTIVERSION
int64_t mark_changes(int element_size, const void* old_words, const void* new_words, int64_t n, uint64_t* bits) {
  switch (element_size) {
    case 1:
      return mark_words<uint8_t>(old_words, new_words, n, bits);
    case 2:
      return mark_words<uint16_t>(old_words, new_words, n, bits);
    case 4:
      return mark_words<uint32_t>(old_words, new_words, n, bits);
    default:
      return mark_words<uint64_t>(old_words, new_words, n, bits);
  }
}

void delta_mark(const DeltaArguments& args, ParallelFor parallel_for) {
  parallel_for(args.first_block[args.count], [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const TensorPart where = delta_block(args, block);
      const auto at = [&](void* const* tensors) {
        return static_cast<const char*>(tensors[where.tensor]) + where.begin * args.element_size;
      };
      uint8_t* changed = args.changed + block * kDeltaBlockBytes;
      args.block_counts[block] = mark_changes(args.element_size, at(args.old_tensors), at(args.new_tensors), where.size,
                                              reinterpret_cast<uint64_t*>(changed));
    }
  });
}

void delta_collect(const DeltaArguments& args, ParallelFor parallel_for) {
  parallel_for(args.first_block[args.count], [&](int64_t first, int64_t last) {
    dispatch_word(args.element_size, [&]<typename Word>() {
      args.wide_indices ? collect<Word, int64_t>(args, first, last) : collect<Word, int32_t>(args, first, last);
    });
  });
}

}  // namespace sparse_opt::cpu
