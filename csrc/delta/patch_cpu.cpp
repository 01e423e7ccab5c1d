// The patch codec on a CPU. A tile is coded by one thread. Its states perform step 1 of a row together, in a loop that
// vectorises; lanes are processed one by one only if one of them writes or reads a number, or for changed words, which
// are coded after all rows of a span. The encoder performs the decoder's steps from the last to the first, so that it
// writes the numbers of a record from its end.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "common/multiversion.h"
#include "delta_codec.h"
#include "patch.h"

namespace sparse_opt::cpu {
namespace {

static_assert(std::endian::native == std::endian::little, "records are copied from and to memory as they are");

constexpr uint32_t kRowScale = 1u << kRowScaleBits;
constexpr uint32_t kLowest = 1u << 16;  // the first state; a decoder whose state is lower reads a number

TensorPart tile_at(const PatchArguments& args, int64_t number) {
  return part_at(args.first_tile, args.count, args.numels, kPatchTile, number);
}

// The numbers of a raw record, which has the tile's bytes and at most one more.
int64_t raw_numbers(int64_t bytes) {
  return (bytes + kRecordUnit - 1) / kRecordUnit;
}

// numbers[i]. A decoder's numbers may be unaligned.
template <typename Number>
Number number_at(const void* numbers, int64_t i) {
  Number number;
  std::memcpy(&number, static_cast<const uint8_t*>(numbers) + i * static_cast<int64_t>(sizeof(Number)), sizeof(Number));
  return number;
}

// Calls call(position) for each set bit of the first `n`, in order.
template <typename Call>
void for_each_bit(const uint64_t* bits, int64_t n, Call call) {
  for (int64_t k = 0; 64 * k < n; ++k) {
    for (uint64_t rest = bits[k]; rest != 0; rest &= rest - 1) call(64 * k + std::countr_zero(rest));
  }
}

// Frequency and start of a symbol, of 2^kValueScaleBits.
struct SymbolRange {
  uint16_t frequency, start;
};

// Bit l is set if byte l of flags [kMaxLanes] has the bit `flag`.
uint32_t lanes_with(const uint8_t* flags, uint8_t flag) {
  uint32_t lanes = 0;
  for (int k = 0; k < kMaxLanes / 8; ++k) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * k, 8);
    eight = eight / flag & 0x0101010101010101u;
    lanes |= static_cast<uint32_t>(eight * 0x0102040810204080u >> 56) << 8 * k;
  }
  return lanes;
}

// The number of states that are computed together: at least `lanes`; the others are unused.
int step_width(int lanes) {
  return lanes <= 8 ? 8 : lanes <= 16 ? 16 : kMaxLanes;
}

// Rows [first, end) of a span, in which only the first `active` lanes have a word.
struct Rows {
  int first, end;
  uint32_t mask;                  // bit l is set for an active lane l
  uint64_t bytes[kMaxLanes / 8];  // byte l is 0xff for an active lane l

  Rows(int first_row, int end_row, int active)
      : first(first_row), end(end_row), mask(static_cast<uint32_t>((uint64_t{1} << active) - 1)) {
    uint8_t flags[kMaxLanes] = {};
    std::fill_n(flags, active, uint8_t{0xff});
    std::memcpy(bytes, flags, kMaxLanes);
  }
};

// Of a span of `size` words: the rows with all lanes, and the row with fewer, if there is one.
Rows full_rows(int size, int lanes) {
  return {0, size / lanes, lanes};
}
Rows last_row(int size, int lanes) {
  return {size / lanes, (size + lanes - 1) / lanes, size % lanes};
}

// The tables of one call, in the form that the coder uses, and the coder of a tile.
class Coder {
 public:
  explicit Coder(const PatchArguments& args);

  // What is wrong with the tables, or null.
  const char* fault() const { return fault_; }

  // Writes the tile's size, appends its record to `out`, and returns the number of changes.
  int64_t encode_tile(int64_t number, std::vector<uint8_t>& out) const;

  // Returns false if the record is damaged, or needs tables that are.
  bool apply_tile(int64_t number) const;

 private:
  template <typename Word>
  uint32_t encode_words(const Word* old_words, const Word* new_words, int64_t t, const uint16_t* row, int64_t* changes,
                        std::vector<uint8_t>& record) const;
  template <typename Word>
  bool apply_words(Word* words, int64_t t, const uint8_t* record, int64_t bytes, const uint16_t* row) const;

  const SymbolRange* ranges(int table) const { return ranges_.data() + table * symbols_; }
  const uint8_t* slots(int table) const { return slots_.data() + (int64_t{table} << kValueScaleBits); }

  const PatchArguments& args_;
  const int symbols_;
  const char* fault_ = nullptr;
  // Copies, which are aligned and do not change after the check.
  std::array<uint8_t, kClasses> class_table_ = {};
  std::vector<uint16_t> rows_;       // [row_count, kClasses]
  std::vector<SymbolRange> ranges_;  // [value_tables, symbols]
  std::vector<uint8_t> slots_;       // [value_tables, 2^kValueScaleBits], the symbol that has the slot; for apply
};

Coder::Coder(const PatchArguments& args) : args_(args), symbols_(patch_symbols(args.element_size)) {
  constexpr int kOne = 1 << kValueScaleBits;
  const auto is_missing = [&](int table) { return table >= args.value_tables; };
  std::copy_n(args.class_table, kClasses, class_table_.begin());
  if (std::any_of(class_table_.begin(), class_table_.end(), is_missing)) {
    fault_ = "class_table has a value table number that values does not have";
    return;
  }
  rows_.resize(static_cast<size_t>(args.row_count) * kClasses);
  std::memcpy(rows_.data(), args.rows, rows_.size() * sizeof(uint16_t));
  if (std::find(rows_.begin(), rows_.end(), 0) != rows_.end()) {
    fault_ = "rows have a frequency of 0";
    return;
  }
  const bool for_apply = args.bad_tile != nullptr;
  ranges_.reserve(static_cast<size_t>(args.value_tables) * symbols_);
  if (for_apply) slots_.resize(static_cast<size_t>(args.value_tables) << kValueScaleBits);
  for (int table = 0; table < args.value_tables; ++table) {
    int start = 0;
    for (int symbol = 0; symbol < symbols_; ++symbol) {
      const auto frequency = number_at<uint16_t>(args.values, table * symbols_ + symbol);
      if (frequency == 0 || start + frequency > kOne) break;
      ranges_.push_back({frequency, static_cast<uint16_t>(start)});
      if (for_apply) std::memset(slots_.data() + (int64_t{table} << kValueScaleBits) + start, symbol, frequency);
      start += frequency;
    }
    if (ranges_.size() != static_cast<size_t>(table + 1) * symbols_ || start != kOne) {
      fault_ = "values are not frequencies that sum to 16384";
      return;
    }
  }
}

// The sample

// Words of which the sample of a large tensor reads the first kSampleBlock.
constexpr int64_t kSampled = int64_t{kSampleBlock} * kSampleStride;

// Adds the counts of parts [part, last) of kSampled words. They are integers, so the sums do not depend on the order in
// which threads add theirs.
template <typename Word>
void sample_parts(const PatchArguments& args, const PatchSample& sample, const std::vector<int64_t>& first_part,
                  int64_t part, int64_t last, std::mutex& mutex) {
  const int symbol_count = patch_symbols(args.element_size);
  std::vector<int64_t> symbols(static_cast<size_t>(kClasses) * symbol_count);
  int64_t tensor = std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin() - 1;
  for (; part < last; ++tensor) {
    const Word* old_words = static_cast<const Word*>(args.old_tensors[tensor]);
    const Word* new_words = static_cast<const Word*>(args.new_tensors[tensor]);
    // Neighbours are often of one class. Four arrays avoid a dependency of each increment on the previous one.
    int64_t seen[4][kClasses] = {}, changed[kClasses] = {};
    for (; part < std::min(last, first_part[tensor + 1]); ++part) {
      const int64_t numel = args.numels[tensor], begin = (part - first_part[tensor]) * kSampled;
      const int64_t end = std::min(begin + (numel > kSampledNumel ? kSampleBlock : kSampled), numel);
      for (int64_t at = begin; at < end; at += kSampleBlock) {
        const Word *a = old_words + at, *b = new_words + at;
        const int64_t n = std::min<int64_t>(kSampleBlock, end - at);
        uint64_t bits[kSampleBlock / 64];
        mark_changes(sizeof(Word), a, b, n, bits);
        for (int64_t i = 0; i < n; ++i) ++seen[i % 4][class_of(a[i], args.class_shift)];
        for_each_bit(bits, n, [&](int64_t i) {
          const int of = class_of(a[i], args.class_shift);
          const Change<Word> change = change_of(a[i], b[i], args.is_float);
          ++changed[of];
          ++symbols[of * symbol_count + symbol_of(change.magnitude, change.negative).symbol];
        });
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    for (int c = 0; c < kClasses; ++c) {
      sample.seen[tensor * kClasses + c] += seen[0][c] + seen[1][c] + seen[2][c] + seen[3][c];
      sample.changed[tensor * kClasses + c] += changed[c];
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < symbols.size(); ++i) sample.symbols[i] += symbols[i];
}

// The encoder

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
[[gnu::always_inline]] inline int push_rows_of_width(uint32_t* __restrict states, const Steps& __restrict steps,
                                                     int stride, int row, int last, const uint64_t* __restrict lanes,
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
int push_rows(int width, uint32_t* states, const Steps& steps, int stride, int row, int last, const uint64_t* lanes,
              uint8_t* flags, uint16_t* low) {
  switch (width) {
    case 8:
      return push_rows_of_width<8>(states, steps, stride, row, last, lanes, flags, low);
    case 16:
      return push_rows_of_width<16>(states, steps, stride, row, last, lanes, flags, low);
    default:
      return push_rows_of_width<32>(states, steps, stride, row, last, lanes, flags, low);
  }
}

// Appends the record, or a raw one if that is shorter. Called only if a word changed. Returns the record's size in
// numbers, with kRawBit for a raw one.
template <typename Word>
uint32_t Coder::encode_words(const Word* old_words, const Word* new_words, int64_t t, const uint16_t* row,
                             int64_t* changes, std::vector<uint8_t>& record) const {
  const int lanes = lanes_of(t), width = step_width(lanes);
  alignas(64) uint32_t states[kMaxLanes];
  std::fill_n(states, kMaxLanes, kLowest);
  const int64_t raw = raw_numbers(t * static_cast<int64_t>(sizeof(Word)));
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
        r = push_rows(width, states, steps, lanes, r, rows.first, rows.bytes, flags, low);
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
  *changes = std::inner_product(old_words, old_words + t, new_words, int64_t{0}, std::plus<>(), std::not_equal_to<>());
  const auto* bytes = reinterpret_cast<const uint8_t*>(new_words);
  record.insert(record.end(), bytes, bytes + t * sizeof(Word));
  record.resize(record.size() + record.size() % kRecordUnit);
  return static_cast<uint32_t>(raw) | kRawBit;
}

int64_t Coder::encode_tile(int64_t number, std::vector<uint8_t>& out) const {
  const TensorPart tile = tile_at(args_, number);
  return dispatch_word(args_.element_size, [&]<typename Word>() {
    const Word* old_words = static_cast<const Word*>(args_.old_tensors[tile.tensor]) + tile.begin;
    const Word* new_words = static_cast<const Word*>(args_.new_tensors[tile.tensor]) + tile.begin;
    const bool same = std::memcmp(old_words, new_words, tile.size * sizeof(Word)) == 0;
    int64_t changes = 0;
    const uint16_t* row = rows_.data() + int64_t{args_.row_of[tile.tensor]} * kClasses;
    args_.sizes[number] = same ? 0 : encode_words(old_words, new_words, tile.size, row, &changes, out);
    return changes;
  });
}

// The decoder

constexpr uint8_t kReads = 1, kChanged = 2;

// Step 1 of rows [row, rows), up to the first in which a lane of `lanes` reads a number. Returns that row, or `rows`.
// flags [kSpanRows, kMaxLanes] get which lanes of a row read a number or have a changed word. Rows are `stride`
// frequencies apart; a frequency of 0 does not change the state. Lanes from `stride` on are unused.
template <int kWidth>
[[gnu::always_inline]] inline int pop_rows_of_width(uint32_t* __restrict states, const uint16_t* __restrict frequencies,
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
int pop_rows(int width, uint32_t* states, const uint16_t* frequencies, int stride, int row, int rows,
             const uint64_t* lanes, uint8_t* flags) {
  switch (width) {
    case 8:
      return pop_rows_of_width<8>(states, frequencies, stride, row, rows, lanes, flags);
    case 16:
      return pop_rows_of_width<16>(states, frequencies, stride, row, rows, lanes, flags);
    default:
      return pop_rows_of_width<32>(states, frequencies, stride, row, rows, lanes, flags);
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
    x = x << 16 | number_at<uint16_t>(next, 0);
    next += 2;
    return true;
  }
};

template <typename Word>
bool Coder::apply_words(Word* words, int64_t t, const uint8_t* record, int64_t bytes, const uint16_t* row) const {
  const int lanes = lanes_of(t), width = step_width(lanes);
  if (bytes < 4 * lanes) return false;
  Reader reader{{}, record + 4 * lanes, record + bytes};
  std::memcpy(reader.states, record, 4 * lanes);
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
        r = pop_rows(width, reader.states, frequencies, lanes, r, rows.end, rows.bytes, flags);
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

bool Coder::apply_tile(int64_t number) const {
  const TensorPart tile = tile_at(args_, number);
  const auto size = number_at<uint32_t>(args_.sizes, number);
  const auto begin = number_at<int64_t>(args_.offsets, number), end = number_at<int64_t>(args_.offsets, number + 1);
  const int64_t length = int64_t{size & ~kRawBit} * kRecordUnit, bytes = tile.size * args_.element_size;
  if (begin < 0 || begin > end || end > args_.record_bytes || begin % kRecordUnit != 0 || end - begin != length)
    return false;
  void* tensor = args_.old_tensors[tile.tensor];
  const uint8_t* record = args_.records + begin;
  if ((size & kRawBit) != 0) {
    if (length != raw_numbers(bytes) * kRecordUnit) return false;
    std::memcpy(static_cast<char*>(tensor) + tile.begin * args_.element_size, record, bytes);
    return true;
  }
  if (length == 0) return true;
  const int row = number_at<uint16_t>(args_.row_of, tile.tensor);
  if (fault_ != nullptr || row >= args_.row_count) return false;
  return dispatch_word(args_.element_size, [&]<typename Word>() {
    return apply_words(static_cast<Word*>(tensor) + tile.begin, tile.size, record, length,
                       rows_.data() + int64_t{row} * kClasses);
  });
}

}  // namespace

void patch_sample(const PatchArguments& args, const PatchSample& sample, ParallelFor parallel_for) {
  std::vector<int64_t> first_part{0};
  for (int64_t i = 0; i < args.count; ++i) {
    first_part.push_back(first_part.back() + (args.numels[i] + kSampled - 1) / kSampled);
  }
  std::mutex mutex;
  parallel_for(first_part.back(), [&](int64_t first, int64_t last) {
    dispatch_word(args.element_size,
                  [&]<typename Word>() { sample_parts<Word>(args, sample, first_part, first, last, mutex); });
  });
}

std::vector<std::vector<uint8_t>> patch_encode(const PatchArguments& args, ParallelFor parallel_for) {
  const auto is_missing = [&](int row) { return row >= args.row_count; };
  if (std::any_of(args.row_of, args.row_of + args.count, is_missing))
    throw std::invalid_argument("row_of has a row number that rows does not have");
  const Coder coder(args);
  if (coder.fault() != nullptr) throw std::invalid_argument(coder.fault());
  std::vector<std::vector<uint8_t>> records(args.tiles());
  parallel_for(args.tiles(), [&](int64_t first, int64_t last) {
    for (int64_t number = first; number < last; ++number) {
      std::atomic_ref<int64_t>(args.changes[tile_at(args, number).tensor]) +=
          coder.encode_tile(number, records[number]);
    }
  });
  return records;
}

void patch_apply(const PatchArguments& args, ParallelFor parallel_for) {
  const Coder coder(args);
  parallel_for(args.tiles(), [&](int64_t first, int64_t last) {
    for (int64_t number = first; number < last; ++number) {
      if (coder.apply_tile(number)) continue;
      std::atomic_ref<int64_t> lowest(*args.bad_tile);
      for (int64_t seen = lowest.load(); number < seen && !lowest.compare_exchange_weak(seen, number);) {
      }
    }
  });
}

}  // namespace sparse_opt::cpu
