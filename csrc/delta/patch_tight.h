// `tight`: the tables of one call, in the form that the coder uses, and the coder of a tile.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "patch.h"
#include "patch_tiles.h"

namespace sparse_opt::cpu {

// Frequency and start of a symbol, of 2^kValueScaleBits.
struct SymbolRange {
  uint16_t frequency, start;
};

// Bit l is set if byte l of flags [kMaxLanes] has the bit `flag`.
inline uint32_t lanes_with(const uint8_t* flags, uint8_t flag) {
  uint32_t lanes = 0;
  for (int k = 0; k < kMaxLanes / 8; ++k) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * k, 8);
    eight = eight / flag & 0x0101010101010101u;
    lanes |= static_cast<uint32_t>(eight * 0x0102040810204080u >> 56) << 8 * k;
  }
  return lanes;
}

inline int lanes_of(int64_t t) {
  return static_cast<int>((t + kLaneRows - 1) / kLaneRows);
}

// The number of states that step_rows computes together: at least `lanes`; the others are unused.
inline int step_width(int lanes) {
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
inline Rows full_rows(int size, int lanes) {
  return {0, size / lanes, lanes};
}
inline Rows last_row(int size, int lanes) {
  return {size / lanes, (size + lanes - 1) / lanes, size % lanes};
}

class TightCoder {
 public:
  // Empty for a call at another level.
  explicit TightCoder(const PatchArguments& args);

  int64_t encode_tile(int64_t number, const PatchTile& tile, std::vector<uint8_t>& out) const;

  // What is wrong with the tables, or null.
  const char* fault() const { return fault_; }

  // Returns false if the record is damaged, or needs tables that are.
  bool apply_tile(int64_t number, const PatchTile& tile, Record record) const;

 private:
  template <typename Word>
  uint32_t encode_words(const Word* old_words, const Word* new_words, int64_t t, const uint16_t* row, int64_t* changes,
                        std::vector<uint8_t>& record) const;
  template <typename Word>
  bool apply_words(Word* words, int64_t t, Record record, const uint16_t* row) const;

  const SymbolRange* ranges(int table) const { return ranges_.data() + table * symbols_; }
  const uint8_t* slots(int table) const { return slots_.data() + (int64_t{table} << kValueScaleBits); }

  const PatchArguments& args_;
  int symbols_ = 0;
  const char* fault_ = nullptr;
  // Copies, which are aligned and do not change after the check.
  std::array<uint8_t, kClasses> class_table_ = {};
  std::vector<uint16_t> rows_;       // [row_count, kClasses]
  std::vector<SymbolRange> ranges_;  // [value_tables, symbols]
  std::vector<uint8_t> slots_;       // [value_tables, 2^kValueScaleBits], the symbol that has the slot; for apply
};

}  // namespace sparse_opt::cpu
