// The decoder of `tight`. The states of a tile perform step 1 of a row together, in a loop that vectorises; lanes are
// processed one by one only if one of them reads a number, or for changed words, after all rows of a span.
#include <algorithm>
#include <cstring>

#include "common/multiversion.h"
#include "patch_tight.h"

namespace sparse_opt::cpu {
namespace {

constexpr uint32_t kRowScale = 1u << kRowScaleBits;
constexpr uint32_t kLowest = 1u << 16;  // a smaller state reads a number
constexpr uint8_t kReads = 1, kChanged = 2;

// Step 1 of rows [row, rows), up to the first in which a lane of `lanes` reads a number. Returns that row, or `rows`.
// flags [kSpanRows, kMaxLanes] get which lanes of a row read a number or have a changed word. Rows are `stride`
// frequencies apart; a frequency of 0 does not change the state. Lanes from `stride` on are unused.
template <int kWidth>
[[gnu::always_inline]] inline int step_rows(uint32_t* __restrict states, const uint16_t* __restrict frequencies,
                                            int stride, int row, int rows, const uint64_t* __restrict lanes,
                                            uint8_t* __restrict flags) {
  uint32_t x[kWidth];
  for (int l = 0; l < kWidth; ++l) x[l] = states[l];
  for (; row < rows; ++row) {
    const uint16_t* f = frequencies + row * stride;
    uint8_t* __restrict found = flags + row * kMaxLanes;
    for (int l = 0; l < kWidth; ++l) {
      const uint32_t change = f[l], unchanged = kRowScale - change;
      const uint32_t q = x[l] >> kRowScaleBits, r = x[l] & (kRowScale - 1);
      const bool changed = r >= unchanged;
      const uint32_t y = (changed ? change : unchanged) * q + r - (changed ? unchanged : 0);
      x[l] = y;
      found[l] = static_cast<uint8_t>((changed ? kChanged : 0) | (y < kLowest ? kReads : 0));
    }
    uint64_t any = 0;
    for (int k = 0; k < kWidth / 8; ++k) {
      uint64_t eight;
      std::memcpy(&eight, found + 8 * k, 8);
      any |= eight & lanes[k];
    }
    if ((any & 0x0101010101010101u * kReads) != 0) break;
  }
  for (int l = 0; l < kWidth; ++l) states[l] = x[l];
  return row;
}

SPARSE_OPT_MULTIVERSION
int step_rows_of(int width, uint32_t* states, const uint16_t* frequencies, int stride, int row, int rows,
                 const uint64_t* lanes, uint8_t* flags) {
  switch (width) {
    case 8:
      return step_rows<8>(states, frequencies, stride, row, rows, lanes, flags);
    case 16:
      return step_rows<16>(states, frequencies, stride, row, rows, lanes, flags);
    default:
      return step_rows<32>(states, frequencies, stride, row, rows, lanes, flags);
  }
}

// The frequencies of `size` words of a span; four words of 16 bits at a time, in half the instructions of a loop.
template <typename Word>
void frequencies_of(const Word* span, int size, int shift, const uint16_t* __restrict row, uint16_t* __restrict out) {
  int i = 0;
  if constexpr (sizeof(Word) == 2) {
    for (; shift <= 8 && i + 4 <= size; i += 4) {
      uint64_t four;
      std::memcpy(&four, span + i, 8);
      four >>= shift;
      const uint64_t found = row[four & 0xff] | uint64_t{row[four >> 16 & 0xff]} << 16 |
                             uint64_t{row[four >> 32 & 0xff]} << 32 | uint64_t{row[four >> 48 & 0xff]} << 48;
      std::memcpy(out + i, &found, 8);
    }
  }
  for (; i < size; ++i) out[i] = row[class_of(span[i], shift)];
}

// The states of a tile, and the numbers that are left to read.
struct Reader {
  alignas(64) uint32_t states[kMaxLanes];
  const uint8_t* next;
  const uint8_t* end;

  // Reads a number if the lane's state is too low. Returns false if none is left.
  bool refill(int lane) {
    uint32_t& x = states[lane];
    if (x >= kLowest) return true;
    if (next == end) return false;
    x = x << 16 | word_at<uint16_t>(next, 0);
    next += 2;
    return true;
  }
};

}  // namespace

template <typename Word>
bool TightCoder::apply_words(Word* words, int64_t t, Record record, const uint16_t* row) const {
  const int lanes = lanes_of(t), width = step_width(lanes);
  if (record.bytes < 4 * lanes) return false;
  Reader reader{{}, record.data + 4 * lanes, record.data + record.bytes};
  std::memcpy(reader.states, record.data, 4 * lanes);
  alignas(64) uint16_t frequencies[(kSpanRows + 1) * kMaxLanes] = {};
  uint8_t flags[kSpanRows * kMaxLanes] = {};
  uint16_t moving[kSpanRows * kMaxLanes];
  const int class_shift = args_.class_shift;

  // Steps 2 and 3 for `count` changed words, at positions at[k] of a span, in lanes 0, 1, ...
  const auto change = [&](Word* span, const uint16_t* at, int count) {
    Symbol symbols[kMaxLanes];
    int most = 0;
    for (int lane = 0; lane < count; ++lane) {
      const int table = class_table_[class_of(span[at[lane]], class_shift)];
      uint32_t& x = reader.states[lane];
      const uint32_t slot = x & ((1u << kValueScaleBits) - 1);
      const int symbol = slots(table)[slot];
      const SymbolRange range = ranges(table)[symbol];
      x = range.frequency * (x >> kValueScaleBits) + slot - range.start;
      if (!reader.refill(lane)) return false;
      symbols[lane] = {symbol, extra_bits(symbol), 0};
      most = std::max(most, symbols[lane].extra);
    }
    for (int have = 0; have < most; have += 16) {
      for (int lane = 0; lane < count; ++lane) {
        const int bits = std::min(16, symbols[lane].extra - have);
        if (bits <= 0) continue;
        uint32_t& x = reader.states[lane];
        symbols[lane].low |= uint64_t{x & ((1u << bits) - 1)} << have;
        x >>= bits;
        if (!reader.refill(lane)) return false;
      }
    }
    for (int lane = 0; lane < count; ++lane) {
      const auto [symbol, extra, low] = symbols[lane];
      Word& word = span[at[lane]];
      word = moved(word, Change<Word>{symbol % 2 == 1, static_cast<Word>(magnitude_of(symbol, low))}, args_.is_float);
    }
    return true;
  };

  for (int64_t begin = 0; begin < t; begin += int64_t{kSpanRows} * lanes) {
    Word* span = words + begin;
    const int size = static_cast<int>(std::min<int64_t>(int64_t{kSpanRows} * lanes, t - begin));
    if (class_shift >= kWordBits<Word>) {
      std::fill_n(frequencies, size, row[0]);
    } else {
      frequencies_of(span, size, class_shift, row, frequencies);
    }
    std::fill_n(frequencies + size, kMaxLanes, uint16_t{0});
    int count = 0;
    for (const Rows rows : {full_rows(size, lanes), last_row(size, lanes)}) {
      for (int r = rows.first; r < rows.end; ++r) {
        r = step_rows_of(width, reader.states, frequencies, lanes, r, rows.end, rows.bytes, flags);
        if (r == rows.end) break;
        for (uint32_t rest = lanes_with(flags + r * kMaxLanes, kReads) & rows.mask; rest != 0; rest &= rest - 1) {
          if (!reader.refill(std::countr_zero(rest))) return false;
        }
      }
      for (int r = rows.first; r < rows.end; ++r) {
        for (uint32_t rest = lanes_with(flags + r * kMaxLanes, kChanged) & rows.mask; rest != 0; rest &= rest - 1) {
          moving[count++] = static_cast<uint16_t>(r * lanes + std::countr_zero(rest));
        }
      }
    }
    for (int k = 0; k < count; k += lanes) {
      if (!change(span, moving + k, std::min(lanes, count - k))) return false;
    }
  }
  return reader.next == reader.end &&
         std::all_of(reader.states, reader.states + lanes, [](uint32_t x) { return x == kLowest; });
}

bool TightCoder::apply_tile(int64_t number, const PatchTile& tile, Record record) const {
  void* words = args_.old_tensors[tile.tensor];
  const int64_t bytes = tile.size * args_.element_size;
  if ((number_at<uint32_t>(args_.sizes, number) & kRawBit) != 0) {
    if (record.bytes != rounded_up(bytes, kTightUnit)) return false;
    std::memcpy(static_cast<char*>(words) + tile.begin * args_.element_size, record.data, bytes);
    return true;
  }
  if (record.bytes == 0) return true;
  const int row = number_at<uint16_t>(args_.row_of, tile.tensor);
  if (fault_ != nullptr || row >= args_.row_count) return false;
  return with_word(args_.element_size, [&](auto word) {
    return apply_words(static_cast<decltype(word)*>(words) + tile.begin, tile.size, record,
                       rows_.data() + int64_t{row} * kClasses);
  });
}

}  // namespace sparse_opt::cpu
