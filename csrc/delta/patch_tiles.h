// Shared by both levels: tiles, the comparison of their words, and the functions that code one tile.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/with_word.h"
#include "patch.h"

namespace sparse_opt::cpu {

static_assert(std::endian::native == std::endian::little, "records are copied from and to memory as they are");

struct PatchTile {
  int64_t tensor, begin, size;
};

inline PatchTile patch_tile_at(const PatchArguments& args, int64_t tile) {
  const int64_t* after = std::upper_bound(args.first_tile, args.first_tile + args.count + 1, tile);
  const int64_t tensor = after - args.first_tile - 1, length = patch_tile(args.level);
  const int64_t begin = (tile - args.first_tile[tensor]) * length;
  return {tensor, begin, std::min(length, args.numels[tensor] - begin)};
}

// A record to decode.
struct Record {
  const uint8_t* data;
  int64_t bytes;
};

constexpr int64_t rounded_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Appends `bytes` bytes to `out`, padded with zeros to a multiple of `unit`.
inline void append_raw(const void* words, int64_t bytes, int64_t unit, std::vector<uint8_t>& out) {
  const size_t begin = out.size();
  out.resize(begin + rounded_up(bytes, unit));
  std::memcpy(out.data() + begin, words, bytes);
}

template <typename Word>
Word word_at(const uint8_t* data, int64_t i) {
  Word word;
  std::memcpy(&word, data + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
  return word;
}

// numbers[i]. A decoder's numbers may be unaligned.
template <typename Number>
Number number_at(const void* numbers, int64_t i) {
  return word_at<Number>(static_cast<const uint8_t*>(numbers), i);
}

// Calls call(position) for each set bit of the first `n`, in order.
template <typename Call>
void for_each_bit(const uint64_t* bits, int64_t n, Call call) {
  for (int64_t k = 0; 64 * k < n; ++k) {
    for (uint64_t rest = bits[k]; rest != 0; rest &= rest - 1) call(64 * k + std::countr_zero(rest));
  }
}

// Sets bit k % 64 of bits[k / 64] if word k changed, and clears it otherwise, also from n to the next multiple of 64.
// Returns the number of changes.
int64_t mark_changes(int element_size, const void* old_words, const void* new_words, int64_t n, uint64_t* bits);

// encode writes the tile's head and size, appends the record to `out`, and returns the number of changes. apply returns
// whether the record is undamaged.
int64_t encode_packed_tile(const PatchArguments& args, int64_t number, const PatchTile& tile,
                           std::vector<uint8_t>& out);
bool apply_packed_tile(const PatchArguments& args, int64_t number, const PatchTile& tile, Record record);

}  // namespace sparse_opt::cpu
