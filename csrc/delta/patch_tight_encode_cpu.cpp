// The encoder of `tight`: the decoder's steps from the last to the first, so the numbers of a record are written from
// its end. As in the decoder, the states perform step 1 of a row together.
#include <memory>

#include "common/multiversion.h"
#include "patch_tight.h"

namespace sparse_opt::cpu {
namespace {

constexpr uint32_t kRowScale = 1u << kRowScaleBits;
constexpr uint32_t kLowest = 1u << 16;
constexpr float kJustBelow1 = 1.0f - 1.0f / (1 << 20);
// The maximum of the numbers that one row, or the changes coded together, write, with four rounds of step 3; and the
// states.
constexpr int kRowCapacity = kMaxLanes * (1 + 4 + 2);

// The push of each word of a span onto its lane's state, in the order of the words: its frequency, of 2^kRowScaleBits,
// and its start.
struct Steps {
  alignas(64) uint16_t frequency_less_1[(kSpanRows + 1) * kMaxLanes];
  alignas(64) uint16_t start[(kSpanRows + 1) * kMaxLanes];
};

// Step 1 of rows row, row - 1, ... to the first in which a lane of `lanes` writes a number, which is in low [kMaxLanes]
// where `flags` is set, or to `last`. Returns that row.
template <int kWidth>
[[gnu::always_inline]] inline int step_rows(uint32_t* __restrict states, const Steps& __restrict steps, int stride,
                                            int row, int last, const uint64_t* __restrict lanes,
                                            uint8_t* __restrict flags, uint16_t* __restrict low) {
  uint32_t x[kWidth];
  for (int l = 0; l < kWidth; ++l) x[l] = states[l];
  for (;; --row) {
    const uint16_t* less_1 = steps.frequency_less_1 + row * stride;
    const uint16_t* start = steps.start + row * stride;
    alignas(64) uint8_t found[kWidth];
    alignas(64) uint16_t written[kWidth];
    for (int l = 0; l < kWidth; ++l) {
      const uint32_t frequency = less_1[l] + 1u, high = x[l] >> 16;
      const bool full = high >= frequency;
      written[l] = static_cast<uint16_t>(x[l]);
      found[l] = full ? 1 : 0;
      const uint32_t y = full ? high : x[l];
      // y / frequency < 2^16. Three roundings, of 2^-24 each, and the factor leave the estimate below the quotient, by
      // less than 2^16 * 2^-19: its whole part is the quotient's, or one less.
      const float estimate = static_cast<float>(y) * (kJustBelow1 / static_cast<float>(frequency));
      const uint32_t q = static_cast<uint32_t>(static_cast<int32_t>(estimate)), r = y - q * frequency;
      // (q + 1 << 16) + r - frequency if r >= frequency
      const uint32_t more = r >= frequency ? kRowScale - frequency : 0;
      x[l] = (q << kRowScaleBits) + r + more + start[l];
    }
    uint64_t any = 0;
    for (int k = 0; k < kWidth / 8; ++k) {
      uint64_t eight;
      std::memcpy(&eight, found + 8 * k, 8);
      any |= eight & lanes[k];
    }
    if (any != 0 || row == last) {
      std::memcpy(flags, found, kWidth);
      std::memcpy(low, written, 2 * kWidth);
      break;
    }
  }
  for (int l = 0; l < kWidth; ++l) states[l] = x[l];
  return row;
}

SPARSE_OPT_MULTIVERSION
int step_rows_of(int width, uint32_t* states, const Steps& steps, int stride, int row, int last, const uint64_t* lanes,
                 uint8_t* flags, uint16_t* low) {
  switch (width) {
    case 8:
      return step_rows<8>(states, steps, stride, row, last, lanes, flags, low);
    case 16:
      return step_rows<16>(states, steps, stride, row, last, lanes, flags, low);
    default:
      return step_rows<32>(states, steps, stride, row, last, lanes, flags, low);
  }
}

template <typename Word>
int64_t count_changes(const Word* a, const Word* b, int64_t t) {
  int64_t count = 0;
  for (int64_t i = 0; i < t; ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

}  // namespace

// Appends the record, or a raw one if that is shorter. Called only if a word changed. Returns the record's size in
// numbers, with kRawBit for a raw one.
template <typename Word>
uint32_t TightCoder::encode_words(const Word* old_words, const Word* new_words, int64_t t, const uint16_t* row,
                                  int64_t* changes, std::vector<uint8_t>& record) const {
  const int lanes = lanes_of(t), width = step_width(lanes);
  alignas(64) uint32_t states[kMaxLanes];
  std::fill_n(states, kMaxLanes, kLowest);
  const int64_t raw = (t * static_cast<int64_t>(sizeof(Word)) + 1) / 2;
  const auto numbers = std::make_unique_for_overwrite<uint16_t[]>(raw + kRowCapacity);
  uint16_t* const end = numbers.get() + raw + kRowCapacity;
  uint16_t* out = end;
  uint16_t unchanged_less_1[kClasses];
  for (int c = 0; c < kClasses; ++c) unchanged_less_1[c] = static_cast<uint16_t>(kRowScale - row[c] - 1);
  Steps steps;
  const int class_shift = args_.class_shift;

  const auto push = [&](int lane, uint32_t frequency, uint32_t start, int scale) {
    uint32_t& x = states[lane];
    if (x >> (32 - scale) >= frequency) {
      *--out = static_cast<uint16_t>(x);
      x >>= 16;
    }
    x = (x / frequency << scale) + x % frequency + start;
  };

  // Steps 3 and 2 for `count` changed words, at positions at[k] of a span, in lanes 0, 1, ...
  const auto change = [&](const Word* a, const Word* b, const uint16_t* at, int count) {
    Symbol symbols[kMaxLanes];
    int most = 0;
    for (int lane = 0; lane < count; ++lane) {
      const Change<Word> by = change_of(a[at[lane]], b[at[lane]], args_.is_float);
      symbols[lane] = symbol_of(by.magnitude, by.negative);
      most = std::max(most, symbols[lane].extra);
    }
    for (int have = (most - 1) & ~15; have >= 0; have -= 16) {
      for (int lane = count - 1; lane >= 0; --lane) {
        const int bits = std::min(16, symbols[lane].extra - have);
        if (bits > 0) push(lane, 1, static_cast<uint32_t>(symbols[lane].low >> have) & ((1u << bits) - 1), bits);
      }
    }
    for (int lane = count - 1; lane >= 0; --lane) {
      const int table = class_table_[class_of(a[at[lane]], class_shift)];
      const SymbolRange range = ranges(table)[symbols[lane].symbol];
      push(lane, range.frequency, range.start, kValueScaleBits);
    }
  };

  alignas(64) uint8_t flags[kMaxLanes] = {};
  uint16_t low[kMaxLanes], moving[kSpanRows * kMaxLanes];
  const auto has_capacity = [&] { return out - numbers.get() >= kRowCapacity; };
  // Encodes the span that begins at word `begin`. Returns false if the record has become longer than a raw one.
  const auto encode_span = [&](int64_t begin) {
    const int size = static_cast<int>(std::min<int64_t>(int64_t{kSpanRows} * lanes, t - begin));
    const Word *a = old_words + begin, *b = new_words + begin;
    uint64_t bits[kSpanRows * kMaxLanes / 64];
    *changes += mark_changes(sizeof(Word), a, b, size, bits);
    for (int i = 0; i < size; ++i) steps.frequency_less_1[i] = unchanged_less_1[class_of(a[i], class_shift)];
    std::fill_n(steps.start, size + kMaxLanes, uint16_t{0});
    int count = 0;
    for_each_bit(bits, size, [&](int64_t i) {
      const uint16_t frequency = row[class_of(a[i], class_shift)];
      steps.frequency_less_1[i] = frequency - 1;
      steps.start[i] = static_cast<uint16_t>(kRowScale - frequency);
      moving[count++] = static_cast<uint16_t>(i);
    });
    // Lanes past the span's last word keep their state.
    std::fill_n(steps.frequency_less_1 + size, kMaxLanes, uint16_t{kRowScale - 1});

    for (int k = (count - 1) / lanes * lanes; k >= 0 && count > 0; k -= lanes) {
      if (!has_capacity()) return false;
      change(a, b, moving + k, std::min(lanes, count - k));
    }
    for (const Rows rows : {last_row(size, lanes), full_rows(size, lanes)}) {
      for (int r = rows.end - 1; r >= rows.first; --r) {
        if (!has_capacity()) return false;
        r = step_rows_of(width, states, steps, lanes, r, rows.first, rows.bytes, flags, low);
        for (uint32_t rest = lanes_with(flags, 1) & rows.mask; rest != 0;) {
          const int lane = 31 - std::countl_zero(rest);
          rest &= ~(1u << lane);
          *--out = low[lane];
        }
      }
    }
    return true;
  };

  *changes = 0;
  bool fits = true;
  const int64_t span = int64_t{kSpanRows} * lanes;
  for (int64_t begin = (t - 1) / span * span; fits && begin >= 0; begin -= span) fits = encode_span(begin);
  out -= 2 * lanes;
  if (fits && end - out <= raw) {
    std::memcpy(out, states, 4 * lanes);
    const auto* bytes = reinterpret_cast<const uint8_t*>(out);
    record.insert(record.end(), bytes, reinterpret_cast<const uint8_t*>(end));
    return static_cast<uint32_t>(end - out);
  }
  *changes = count_changes(old_words, new_words, t);
  append_raw(new_words, t * static_cast<int64_t>(sizeof(Word)), kTightUnit, record);
  return static_cast<uint32_t>(raw) | kRawBit;
}

int64_t TightCoder::encode_tile(int64_t number, const PatchTile& tile, std::vector<uint8_t>& out) const {
  return with_word(args_.element_size, [&](auto word) {
    using Word = decltype(word);
    const Word* old_words = static_cast<const Word*>(args_.old_tensors[tile.tensor]) + tile.begin;
    const Word* new_words = static_cast<const Word*>(args_.new_tensors[tile.tensor]) + tile.begin;
    const bool same = std::memcmp(old_words, new_words, tile.size * sizeof(Word)) == 0;
    int64_t changes = 0;
    const uint16_t* row = rows_.data() + int64_t{args_.row_of[tile.tensor]} * kClasses;
    static_cast<uint32_t*>(args_.sizes)[number] =
        same ? 0 : encode_words(old_words, new_words, tile.size, row, &changes, out);
    return changes;
  });
}

}  // namespace sparse_opt::cpu
