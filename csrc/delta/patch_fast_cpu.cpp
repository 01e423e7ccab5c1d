// `fast`. The comparison reads both tensors once; the rest accesses the cache lines that contain a change.
#include "common/blocks.h"
#include "patch_tiles.h"

namespace sparse_opt::cpu {
namespace {

template <typename Word>
int encode_tile(const Word* old_words, const Word* new_words, int t, uint16_t* head, uint16_t* units,
                std::vector<uint8_t>& out) {
  constexpr int kSize = sizeof(Word);
  uint64_t bits[kPatchTile / 64] = {};
  const int n = static_cast<int>(mark_changes(kSize, old_words, new_words, t, bits));
  *head = *units = 0;
  if (n == 0) return 0;
  const int run_count = (t + kPatchRun - 1) / kPatchRun;
  int runs[kPatchTile / kPatchRun];
  bool listable = true;
  for (int run = 0; run < run_count; ++run) {
    const uint64_t* of = bits + run * (kPatchRun / 64);
    runs[run] = std::popcount(of[0]) + std::popcount(of[1]) + std::popcount(of[2]) + std::popcount(of[3]);
    listable = listable && runs[run] < kPatchRun;
  }
  const int64_t raw = rounded_up(int64_t{t} * kSize, kRecordUnit);
  const int64_t bitmap = rounded_up(fast_bitmap_bytes(n, t, kSize), kRecordUnit);
  const int64_t list = listable ? rounded_up(fast_list_bytes(n, t, kSize), kRecordUnit) : INT64_MAX;
  const int mode = list <= std::min(bitmap, raw) ? kModeList : bitmap <= raw ? kModeBitmap : kModeRaw;
  const int64_t length = std::min({list, bitmap, raw});
  *head = static_cast<uint16_t>(n | mode << kModeShift);
  *units = static_cast<uint16_t>(length / kRecordUnit);
  if (mode == kModeRaw) {
    append_raw(new_words, int64_t{t} * kSize, kRecordUnit, out);
    return n;
  }

  const size_t begin = out.size();
  out.resize(begin + length);
  uint8_t* values = out.data() + begin;
  uint8_t* positions = nullptr;
  if (mode == kModeBitmap) {
    const int64_t bytes = int64_t{t + 31} / 32 * 4;
    std::memcpy(values, bits, bytes);
    values += bytes;
  } else {
    positions = values + int64_t{n} * kSize;
    for (int run = 0; run < run_count; ++run) *positions++ = static_cast<uint8_t>(runs[run]);
  }
  for_each_bit(bits, t, [&](int64_t position) {
    std::memcpy(values, new_words + position, kSize);
    values += kSize;
    if (positions != nullptr) *positions++ = static_cast<uint8_t>(position % kPatchRun);
  });
  return n;
}

// Applies a list. The record has the length that its head requires.
template <typename Word>
bool apply_list(Word* words, int t, int n, Record record) {
  const int run_count = (t + kPatchRun - 1) / kPatchRun;
  const uint8_t* runs = record.data + static_cast<int64_t>(n) * sizeof(Word);
  const uint8_t* positions = runs + run_count;
  int sum = 0;
  for (int run = 0; run < run_count; ++run) sum += runs[run];
  if (sum != n) return false;
  for (int run = 0, i = 0; run < run_count; ++run) {
    const int size = std::min(kPatchRun, t - run * kPatchRun);
    Word* of = words + run * kPatchRun;
    for (int last = -1, end = i + runs[run]; i < end; ++i) {
      const int position = positions[i];
      if (position <= last || position >= size) return false;
      of[position] = word_at<Word>(record.data, i);
      last = position;
    }
  }
  return true;
}

template <typename Word>
bool apply_bitmap(Word* words, int t, int n, Record record) {
  const int64_t numbers = int64_t{t + 31} / 32;
  uint64_t bits[kPatchTile / 64] = {};
  std::memcpy(bits, record.data, numbers * 4);
  int sum = 0;
  for (const uint64_t number : bits) sum += std::popcount(number);
  if (sum != n || (t % 64 != 0 && bits[t / 64] >> (t % 64) != 0)) return false;
  int i = 0;
  for_each_bit(bits, t, [&](int64_t position) { words[position] = word_at<Word>(record.data + numbers * 4, i++); });
  return true;
}

}  // namespace

int64_t encode_fast_tile(const PatchArguments& args, int64_t number, const PatchTile& tile, std::vector<uint8_t>& out) {
  return with_word(args.element_size, [&](auto word) {
    using Word = decltype(word);
    return encode_tile(static_cast<const Word*>(args.old_tensors[tile.tensor]) + tile.begin,
                       static_cast<const Word*>(args.new_tensors[tile.tensor]) + tile.begin,
                       static_cast<int>(tile.size), args.heads + number, static_cast<uint16_t*>(args.sizes) + number,
                       out);
  });
}

bool apply_fast_tile(const PatchArguments& args, int64_t number, const PatchTile& tile, Record record) {
  const uint32_t head = number_at<uint16_t>(args.heads, number);
  const int n = static_cast<int>(head & kCountMask), mode = static_cast<int>(head >> kModeShift);
  const int t = static_cast<int>(tile.size);
  if (record.bytes != fast_record_bytes(head, t, args.element_size)) return false;
  if (n == 0) return true;
  if (mode == kModeRaw) {
    std::memcpy(at(args.old_tensors[tile.tensor], tile.begin, args.element_size), record.data,
                tile.size * args.element_size);
    return true;
  }
  return with_word(args.element_size, [&](auto word) {
    auto* words = static_cast<decltype(word)*>(args.old_tensors[tile.tensor]) + tile.begin;
    return mode == kModeBitmap ? apply_bitmap(words, t, n, record) : apply_list(words, t, n, record);
  });
}

}  // namespace sparse_opt::cpu
