// The patch codec: constants and arithmetic, as docs/formats.md defines them, arguments, and the launchers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/arguments.h"

namespace sparse_opt {

constexpr int64_t kPatchTile = int64_t{1} << 19;  // words
constexpr int kLaneRows = 16384;                  // words of a lane of a tile
constexpr int kSpanRows = 64;                     // rows whose changes are coded together
constexpr int kMaxLanes = kPatchTile / kLaneRows;

constexpr uint32_t kRawBit = 1u << 31;  // of a size
constexpr int kRecordUnit = 2;          // bytes

constexpr int kClasses = 256;
constexpr int kRowScaleBits = 16, kValueScaleBits = 14;
constexpr int kMaxValueTables = 64;

// Of a tensor with more words than this, a sample reads every kSampleStride-th block of kSampleBlock words.
constexpr int64_t kSampledNumel = int64_t{1} << 20;
constexpr int kSampleBlock = 4096, kSampleStride = 16;

template <typename Word>
constexpr int kWordBits = 8 * static_cast<int>(sizeof(Word));

// The number of symbols in the code of a change.
SPARSE_OPT_HOST_DEVICE constexpr int patch_symbols(int element_size) {
  return 2 * (4 + 2 * (8 * element_size - 3));
}

// Maps words to unsigned numbers in the order of the words' values, and back.
template <typename Word>
SPARSE_OPT_HOST_DEVICE Word ordered(Word w, bool is_float) {
  constexpr Word kTop = static_cast<Word>(Word{1} << (kWordBits<Word> - 1));
  if (!is_float) return w;
  return static_cast<Word>(w >= kTop ? ~w : w ^ kTop);
}

template <typename Word>
SPARSE_OPT_HOST_DEVICE Word ordered_back(Word o, bool is_float) {
  constexpr Word kTop = static_cast<Word>(Word{1} << (kWordBits<Word> - 1));
  if (!is_float) return o;
  return static_cast<Word>(o >= kTop ? o ^ kTop : ~o);
}

// The signed difference of two words; magnitude is in [1, 2^(bits - 1)].
template <typename Word>
struct Change {
  bool negative;
  Word magnitude;
};

template <typename Word>
SPARSE_OPT_HOST_DEVICE Change<Word> change_of(Word old_word, Word new_word, bool is_float) {
  const Word d = static_cast<Word>(ordered(new_word, is_float) - ordered(old_word, is_float));
  const bool negative = (d >> (kWordBits<Word> - 1)) != 0;
  return {negative, static_cast<Word>(negative ? Word{0} - d : d)};
}

template <typename Word>
SPARSE_OPT_HOST_DEVICE Word moved(Word old_word, Change<Word> change, bool is_float) {
  const Word d = static_cast<Word>(change.negative ? Word{0} - change.magnitude : change.magnitude);
  return ordered_back(static_cast<Word>(ordered(old_word, is_float) + d), is_float);
}

template <typename Word>
SPARSE_OPT_HOST_DEVICE int class_of(Word w, int class_shift) {
  return class_shift >= kWordBits<Word> ? 0 : static_cast<int>((w >> class_shift) & (kClasses - 1));
}

SPARSE_OPT_HOST_DEVICE int floor_log2(uint64_t v) {  // v > 0
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(v));
#else
  return 63 - __builtin_clzll(v);
#endif
}

struct Symbol {
  int symbol;
  int extra;     // number of extra bits
  uint64_t low;  // the extra bits
};

SPARSE_OPT_HOST_DEVICE Symbol symbol_of(uint64_t magnitude, bool negative) {
  const uint64_t v = magnitude - 1;
  if (v < 4) return {2 * static_cast<int>(v) + (negative ? 1 : 0), 0, 0};
  const int length = floor_log2(v), extra = length - 1;
  const int bucket = 4 + 2 * (length - 2) + static_cast<int>((v >> extra) & 1);
  return {2 * bucket + (negative ? 1 : 0), extra, v & ((uint64_t{1} << extra) - 1)};
}

SPARSE_OPT_HOST_DEVICE int extra_bits(int symbol) {
  const int bucket = symbol / 2;
  return bucket < 4 ? 0 : 1 + (bucket - 4) / 2;
}

SPARSE_OPT_HOST_DEVICE uint64_t magnitude_of(int symbol, uint64_t low) {
  const int bucket = symbol / 2;
  if (bucket < 4) return static_cast<uint64_t>(bucket) + 1;
  const int extra = 1 + (bucket - 4) / 2;
  return (uint64_t{2} << extra) + (static_cast<uint64_t>(bucket % 2) << extra) + low + 1;
}

// The number of lanes of a tile of t words.
SPARSE_OPT_HOST_DEVICE int lanes_of(int64_t t) {
  return static_cast<int>((t + kLaneRows - 1) / kLaneRows);
}

// One call of the codec, for tensors of one element size. The lists, numels and first_tile are in host memory, all else
// on the device.
struct PatchArguments {
  int64_t count = 0;
  void* const* old_tensors = nullptr;   // [count]; apply changes them
  void* const* new_tensors = nullptr;   // [count]; null for apply
  const int64_t* numels = nullptr;      // [count]
  const int64_t* first_tile = nullptr;  // [count + 1]: tensor i has tiles [first[i], first[i + 1])
  int element_size = 0;                 // 1, 2, 4 or 8
  bool is_float = false;
  int class_shift = 0;

  // The tables; a sample has none.
  const uint16_t* row_of = nullptr;      // [count]
  const uint16_t* rows = nullptr;        // [row_count, kClasses]
  const uint8_t* class_table = nullptr;  // [kClasses]
  const uint16_t* values = nullptr;      // [value_tables, patch_symbols(element_size)]
  int row_count = 0, value_tables = 0;

  // Written by encode, read by apply.
  uint32_t* sizes = nullptr;         // [tiles], of the records, in units of kRecordUnit
  const int64_t* offsets = nullptr;  // [tiles + 1], bytes; not of encode on a CPU, which returns the records
  uint8_t* records = nullptr;        // [record_bytes]
  int64_t record_bytes = 0;
  int64_t* bad_tile = nullptr;  // [1], apply only: set to the lowest number of a damaged tile, if there is one
  int64_t* changes = nullptr;   // [count], encode only: incremented

  // Scratch memory of a GPU.
  const int32_t* value_ends = nullptr;  // [value_tables, symbols], running sums of values
  int64_t* lengths = nullptr;           // [tiles], of the records, in bytes
  uint8_t* slots = nullptr;             // [tiles, slot_bytes]
  int64_t* overflowed = nullptr;        // [tiles], the numbers of tiles whose record is longer, in any order
  int64_t* overflows = nullptr;         // [1], how many these are: incremented
  int slot_bytes = 0;

  int64_t tiles() const { return first_tile[count]; }
};

// The sums of a sample, on the device. patch_sample adds to them.
struct PatchSample {
  int64_t* seen = nullptr;     // [count, kClasses]
  int64_t* changed = nullptr;  // [count, kClasses]
  int64_t* symbols = nullptr;  // [kClasses, patch_symbols(element_size)]
};

namespace cpu {

void patch_sample(const PatchArguments& args, const PatchSample& sample, ParallelFor parallel_for);

// Writes sizes, and adds to args.changes. Returns the records, which do not depend on the number of threads. Throws
// std::invalid_argument for invalid tables.
std::vector<std::vector<uint8_t>> patch_encode(const PatchArguments& args, ParallelFor parallel_for);

// Stays within the records and the tensors, whatever sizes, offsets, records and tables contain, and whatever their
// alignment; the tensors are aligned. Writes the tensors and bad_tile only. The words of a damaged tile are undefined
// afterwards; all other tiles are decoded.
void patch_apply(const PatchArguments& args, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

void patch_sample(const PatchArguments& args, const PatchSample& sample, cudaStream_t stream);

// The encoder's three steps. encode_to_slots writes sizes, lengths, changes, overflowed, overflows, and the slots of
// the records that fit. Given offsets, the running sums of lengths: compact_slots copies those to records, if they end
// within record_bytes, and encode_overflow writes the `overflows` others, for which records must be large enough.
void encode_to_slots(const PatchArguments& args, cudaStream_t stream);
void compact_slots(const PatchArguments& args, cudaStream_t stream);
void encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream);
void patch_apply(const PatchArguments& args, cudaStream_t stream);

}  // namespace cuda

}  // namespace sparse_opt
