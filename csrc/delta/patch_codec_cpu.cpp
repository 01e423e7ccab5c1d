#include "patch_codec.h"

#include <atomic>
#include <optional>

#include "common/multiversion.h"
#include "patch_tight.h"
#include "patch_tiles.h"

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

// The number of tiles in a piece of work for one thread.
int64_t piece_tiles(PatchLevel level) {
  return level == PatchLevel::kTight ? 1 : 64;
}

template <typename Body>
void for_each_tile(const PatchArguments& args, ParallelFor parallel_for, Body body) {
  const int64_t tiles = args.tiles(), piece = piece_tiles(args.level);
  parallel_for((tiles + piece - 1) / piece, [&](int64_t first, int64_t last) {
    for (int64_t number = first * piece; number < std::min(last * piece, tiles); ++number) body(number);
  });
}

// The record of a tile, if its size and offsets are consistent and it is within the records.
std::optional<Record> record_of(const PatchArguments& args, int64_t number) {
  const bool tight = args.level == PatchLevel::kTight;
  const int64_t unit = tight ? kTightUnit : kRecordUnit;
  const int64_t size =
      tight ? number_at<uint32_t>(args.sizes, number) & ~kRawBit : number_at<uint16_t>(args.sizes, number);
  const auto begin = number_at<int64_t>(args.offsets, number), end = number_at<int64_t>(args.offsets, number + 1);
  if (begin < 0 || begin > end || end > args.record_bytes || begin % unit != 0 || end - begin != size * unit) return {};
  return Record{args.records + begin, end - begin};
}

bool apply_tile(const PatchArguments& args, const TightCoder& tight, int64_t number) {
  const PatchTile tile = patch_tile_at(args, number);
  const std::optional<Record> record = record_of(args, number);
  if (!record) return false;
  return args.level == PatchLevel::kPacked ? apply_packed_tile(args, number, tile, *record)
                                           : tight.apply_tile(number, tile, *record);
}

void report(int64_t* bad_tile, int64_t number) {
  std::atomic_ref<int64_t> lowest(*bad_tile);
  for (int64_t seen = lowest.load(); number < seen && !lowest.compare_exchange_weak(seen, number);) {
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

const char* patch_tables_fault(const PatchArguments& args) {
  if (args.level != PatchLevel::kTight) return nullptr;
  const auto is_missing = [&](int row) { return row >= args.row_count; };
  if (std::any_of(args.row_of, args.row_of + args.count, is_missing))
    return "row_of has a row number that rows does not have";
  return TightCoder(args).fault();
}

std::vector<std::vector<uint8_t>> patch_encode(const PatchArguments& args, ParallelFor parallel_for) {
  const int64_t piece = piece_tiles(args.level);
  std::vector<std::vector<uint8_t>> pieces((args.tiles() + piece - 1) / piece);
  const TightCoder tight(args);
  for_each_tile(args, parallel_for, [&](int64_t number) {
    const PatchTile tile = patch_tile_at(args, number);
    std::vector<uint8_t>& out = pieces[number / piece];
    const int64_t changes = args.level == PatchLevel::kPacked ? encode_packed_tile(args, number, tile, out)
                                                              : tight.encode_tile(number, tile, out);
    std::atomic_ref<int64_t>(args.changes[tile.tensor]) += changes;
  });
  return pieces;
}

void patch_apply(const PatchArguments& args, ParallelFor parallel_for) {
  const TightCoder tight(args);
  for_each_tile(args, parallel_for, [&](int64_t number) {
    if (!apply_tile(args, tight, number)) report(args.bad_tile, number);
  });
}

}  // namespace sparse_opt::cpu
