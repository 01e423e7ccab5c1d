// The patch codec on a GPU: one warp for each tile, and one lane of the warp for each lane of the tile. encode_to_slots
// reads both tensors once, 2 * element size bytes per element, and a span of the old one again from the caches;
// patch_apply reads the tensor once and writes the words that change. Both are bound by instructions: about 30 to
// encode an unchanged word and 20 to decode it. The changes of a span are coded together, after its rows, because a
// warp whose lanes coded single changes would diverge.
#include <type_traits>

#include "common/dispatch.cuh"
#include "common/segment_table.cuh"
#include "patch.h"

namespace sparse_opt::cuda {
namespace {

constexpr int kAhead = 8;  // rows that are loaded together
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kInitialState = 1u << 16;
// Value tables of at most this many entries are copied to shared memory; larger ones are read through the caches.
constexpr int kSharedValues = 1024;

// The reciprocal to divide by a frequency: x / f is __umulhi(x, reciprocal) or one more, for all x and f > 0.
__device__ __forceinline__ uint32_t reciprocal_of(uint32_t f) {
  return f == 1 ? 0xffffffffu : static_cast<uint32_t>((uint64_t{1} << 32) / f);
}

struct Frequency {
  uint32_t frequency, reciprocal;
};

// The changed words of a span's rows, a mask for each row: lane l holds those of rows l and 32 + l.
struct SpanMasks {
  static_assert(kSpanRows == 64);
  uint32_t low = 0, high = 0;

  __device__ __forceinline__ void set(int row, uint32_t mask) {
    const bool mine = static_cast<int>(threadIdx.x) == row % 32;
    if (mine && row < 32) low = mask;
    if (mine && row >= 32) high = mask;
  }
  __device__ __forceinline__ uint32_t get(int row) const { return __shfl_sync(kAll, row < 32 ? low : high, row % 32); }
};

// In shared memory: the frequencies for one tensor's tiles, and the positions of a span's changes.
struct PatchTables {
  Frequency words[2 * kClasses];  // of 2 * class + (1 if the word changed), of 65536
  uint8_t value_table[kClasses];
  int32_t shared_ends[kSharedValues];
  const int32_t* ends;  // [value_tables, symbols], running sums
  uint16_t moving[kSpanRows * 32];

  template <typename Word>
  __device__ __forceinline__ void load(const PatchArguments& args, int64_t tensor) {
    const int row_number = min(static_cast<int>(args.row_of[tensor]), args.row_count - 1);
    const uint16_t* row = args.rows + static_cast<int64_t>(row_number) * kClasses;
    for (int c = threadIdx.x; c < kClasses; c += 32) {
      const uint32_t f = max(static_cast<uint32_t>(row[c]), 1u), same = (1u << kRowScaleBits) - f;
      words[2 * c] = {same, reciprocal_of(same)};
      words[2 * c + 1] = {f, reciprocal_of(f)};
      value_table[c] = static_cast<uint8_t>(min(static_cast<int>(args.class_table[c]), args.value_tables - 1));
    }
    const int all = patch_symbols(sizeof(Word)) * args.value_tables;
    const bool fits = all <= kSharedValues;
    for (int i = threadIdx.x; fits && i < all; i += 32) shared_ends[i] = args.value_ends[i];
    if (threadIdx.x == 0) ends = fits ? shared_ends : args.value_ends;
    __syncwarp();
  }

  template <typename Word>
  __device__ __forceinline__ const int32_t* ends_of(Word old_word, int class_shift) const {
    return ends + value_table[class_of(old_word, class_shift)] * patch_symbols(sizeof(Word));
  }

  // Lists the positions of a span's changed words, in order. Returns their number.
  __device__ __forceinline__ int list(const SpanMasks& masks, int lanes) {
    int found = 0;
#pragma unroll
    for (int i = 0; i < kSpanRows / 32; ++i) {
      const uint32_t mask = i == 0 ? masks.low : masks.high;
      const int count = __popc(mask);
      int rank = count;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(kAll, rank, offset);
        if (static_cast<int>(threadIdx.x) >= offset) rank += below;
      }
      const int total = __shfl_sync(kAll, rank, 31);
      rank += found - count;
      for (uint32_t bits = mask; bits != 0; bits &= bits - 1) {
        moving[rank++] = static_cast<uint16_t>((32 * i + threadIdx.x) * lanes + __ffs(static_cast<int>(bits)) - 1);
      }
      found += total;
    }
    __syncwarp();
    return found;
  }
};

__device__ __forceinline__ uint32_t lanes_below() {
  return (1u << threadIdx.x) - 1u;
}

// The numbers of a record, written from its end towards its beginning.
struct Writer {
  uint16_t* numbers;  // of the whole record
  int cursor;         // the first written number; below 0, numbers are counted and not written

  __device__ __forceinline__ void spill(bool full, uint32_t& x) {
    const uint32_t lanes = __ballot_sync(kAll, full);
    if (lanes == 0) return;
    cursor -= __popc(lanes);
    if (full) {
      const int i = cursor + __popc(lanes & lanes_below());
      if (i >= 0) numbers[i] = static_cast<uint16_t>(x);
      x >>= 16;
    }
  }

  __device__ __forceinline__ void push(bool part, uint32_t& x, Frequency f, uint32_t start, int scale) {
    spill(part && x >> (32 - scale) >= f.frequency, x);
    uint32_t quotient = __umulhi(x, f.reciprocal);
    if (x - quotient * f.frequency >= f.frequency) ++quotient;
    // quotient << scale | rest
    if (part) x += quotient * ((1u << scale) - f.frequency) + start;
  }

  __device__ __forceinline__ void push_bits(bool part, uint32_t& x, uint32_t bits, int width) {
    spill(part && x >> (32 - width) >= 1, x);
    if (part) x = x << width | bits;
  }
};

// Steps 3 and 2 for a span's changes.
template <typename Word>
__device__ __forceinline__ void push_values(const Word* old_words, const Word* new_words, int lanes, int total,
                                            const PatchTables& tables, const PatchArguments& args, Writer& writer,
                                            uint32_t& x) {
  const int lane = threadIdx.x;
  for (int first = (total - 1) / lanes * lanes; total > 0 && first >= 0; first -= lanes) {
    const bool part = lane < lanes && first + lane < total;
    Symbol symbol = {0, 0, 0};
    Frequency f = {1, 0xffffffffu};
    uint32_t start = 0;
    if (part) {
      const int k = tables.moving[first + lane];
      const Word old_word = old_words[k];
      const Change<Word> change = change_of(old_word, new_words[k], args.is_float);
      symbol = symbol_of(change.magnitude, change.negative);
      const int32_t* ends = tables.ends_of(old_word, args.class_shift);
      start = symbol.symbol > 0 ? ends[symbol.symbol - 1] : 0;
      f.frequency = ends[symbol.symbol] - start;
      f.reciprocal = reciprocal_of(f.frequency);
    }
    int rounds = 0;  // not by __reduce_max_sync: nvcc 13.0 gave wrong maxima in an unrolled loop
    while (__any_sync(kAll, symbol.extra > 16 * rounds)) ++rounds;
    for (int round = rounds - 1; round >= 0; --round) {
      const int width = max(0, min(16, symbol.extra - 16 * round));
      const auto bits = static_cast<uint32_t>(symbol.low >> (16 * round)) & ((1u << width) - 1u);
      writer.push_bits(width > 0, x, bits, width);
    }
    writer.push(part, x, f, start, kValueScaleBits);
  }
}

// Encodes all spans of a tile, from the last to the first. Returns the number of changed words.
template <typename Word>
__device__ __forceinline__ int encode_tile(const Word* old_words, const Word* new_words, int t, int lanes,
                                           PatchTables& tables, const PatchArguments& args, Writer& writer,
                                           uint32_t& x) {
  const int lane = threadIdx.x, span = kSpanRows * lanes;
  const int lane_end = lane < lanes ? t : 0;  // words from here on are not this lane's
  Word next_a[kAhead], next_b[kAhead];
  const auto load = [&](int row) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = row + i * lanes + lane;
      const bool has_word = row >= 0 && k < lane_end;
      next_a[i] = has_word ? old_words[k] : Word{0};
      next_b[i] = has_word ? new_words[k] : Word{0};
    }
  };
  const int last = (t - 1) / span * span;
  load(last);
  int changed = 0;
  for (int begin = last; begin >= 0; begin -= span) {
    SpanMasks masks;
#pragma unroll 1
    for (int first = 0; first < kSpanRows; first += kAhead) {
      uint32_t differ = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) differ |= (next_a[i] != next_b[i] ? 1u : 0u) << i;
      load(first + kAhead < kSpanRows ? begin + (first + kAhead) * lanes : begin - span);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) masks.set(first + i, __ballot_sync(kAll, (differ >> i & 1u) != 0));
    }
    const int total = tables.list(masks, lanes);
    changed += total;
    push_values(old_words + begin, new_words + begin, lanes, total, tables, args, writer, x);
    __syncwarp();  // before the next list overwrites this one

#pragma unroll 1
    for (int first = kSpanRows - kAhead; first >= 0; first -= kAhead) {
      Frequency f[kAhead];
      uint32_t moves = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = begin + (first + i) * lanes + lane;
        const int of = k < lane_end ? class_of(old_words[k], args.class_shift) : 0;
        const uint32_t bit = masks.get(first + i) >> lane & 1u;
        f[i] = tables.words[2 * of + bit];
        moves |= bit << i;
      }
#pragma unroll
      for (int i = kAhead - 1; i >= 0; --i) {
        const int k = begin + (first + i) * lanes + lane;
        const uint32_t start = (moves >> i & 1u) != 0 ? (1u << kRowScaleBits) - f[i].frequency : 0;
        writer.push(k < lane_end, x, f[i], start, kRowScaleBits);
      }
    }
  }
  return changed;
}

template <typename Word>
__device__ __forceinline__ uint32_t raw_numbers(int t) {
  return static_cast<uint32_t>((static_cast<int64_t>(t) * sizeof(Word) + kRecordUnit - 1) / kRecordUnit);
}

// Copies `t` words between a tensor and a raw record, which is aligned to 2 bytes.
template <typename Word>
__device__ __forceinline__ void copy_raw(const void* from, void* to, int t) {
  using Part = std::conditional_t<sizeof(Word) == 1, uint8_t, uint16_t>;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(t) * (sizeof(Word) / sizeof(Part)); i += 32) {
    static_cast<Part*>(to)[i] = static_cast<const Part*>(from)[i];
  }
}

__device__ __forceinline__ void write_states(uint32_t x, int lanes, uint16_t* numbers) {
  if (static_cast<int>(threadIdx.x) >= lanes) return;
  numbers[2 * threadIdx.x] = static_cast<uint16_t>(x);
  numbers[2 * threadIdx.x + 1] = static_cast<uint16_t>(x >> 16);
}

// A record that fits is written to the end of its slot.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(32) encode_to_slots_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                             const __grid_constant__ PatchArguments args) {
  __shared__ PatchTables tables;
  const BlockRange range = block_range(table, kPatchTile);
  const int64_t number = table.block_offset + blockIdx.x;
  const int t = static_cast<int>(range.end - range.begin), lanes = lanes_of(t);
  const Word* old_words = static_cast<const Word*>(table.companions[range.segment]) + range.begin;
  const Word* new_words = static_cast<const Word*>(table.dense[range.segment]) + range.begin;
  auto* slot = reinterpret_cast<uint16_t*>(args.slots + number * args.slot_bytes);
  const int slot_numbers = args.slot_bytes / kRecordUnit;
  tables.load<Word>(args, range.number);
  Writer writer = {slot, slot_numbers};
  uint32_t x = kInitialState;
  const int changed = encode_tile(old_words, new_words, t, lanes, tables, args, writer, x);
  const int length = slot_numbers - writer.cursor + 2 * lanes;
  uint32_t size = 0;
  if (changed != 0) {
    const bool raw = static_cast<int>(raw_numbers<Word>(t)) < length;
    size = raw ? raw_numbers<Word>(t) | kRawBit : static_cast<uint32_t>(length);
    const bool fits = !raw && length <= slot_numbers;
    if (fits) write_states(x, lanes, slot + slot_numbers - length);
    if (threadIdx.x == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.changes + range.number), changed);
      if (!fits) args.overflowed[atomicAdd(reinterpret_cast<unsigned long long*>(args.overflows), 1ull)] = number;
    }
  }
  if (threadIdx.x != 0) return;
  args.sizes[number] = size;
  args.lengths[number] = static_cast<int64_t>(size & ~kRawBit) * kRecordUnit;
}

// One block for each tile: copies its slot to its place in the records, if it ends within them.
__global__ void __launch_bounds__(kThreads) compact_slots_kernel(const __grid_constant__ PatchArguments args) {
  const int64_t number = blockIdx.x;
  const uint32_t size = args.sizes[number];
  const int64_t begin = args.offsets[number], length = static_cast<int64_t>(size) * kRecordUnit;
  if ((size & kRawBit) != 0 || length > args.slot_bytes || begin + length > args.record_bytes) return;
  const uint8_t* slot = args.slots + (number + 1) * args.slot_bytes - length;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    reinterpret_cast<uint16_t*>(args.records + begin)[i] = reinterpret_cast<const uint16_t*>(slot)[i];
  }
}

// One warp for each tile whose record does not fit a slot.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(32) encode_overflow_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                             const __grid_constant__ PatchArguments args) {
  __shared__ PatchTables tables;
  const int64_t number = args.overflowed[blockIdx.x];
  const int64_t local = number - table.block_offset;
  if (local < 0 || local >= table.first_block[table.count]) return;  // another table's
  const BlockRange range = block_range(table, kPatchTile, static_cast<int>(local));
  const uint32_t size = args.sizes[number];
  const int t = static_cast<int>(range.end - range.begin), lanes = lanes_of(t);
  const Word* old_words = static_cast<const Word*>(table.companions[range.segment]) + range.begin;
  const Word* new_words = static_cast<const Word*>(table.dense[range.segment]) + range.begin;
  auto* numbers = reinterpret_cast<uint16_t*>(args.records + args.offsets[number]);
  if ((size & kRawBit) != 0) {
    if (sizeof(Word) == 1 && t % 2 == 1) numbers[t / 2] = 0;  // the byte that fills the record
    __syncwarp();
    copy_raw<Word>(new_words, numbers, t);
    return;
  }
  tables.load<Word>(args, range.number);
  Writer writer = {numbers, static_cast<int>(size)};
  uint32_t x = kInitialState;
  encode_tile(old_words, new_words, t, lanes, tables, args, writer, x);
  write_states(x, lanes, numbers);
}

// Reads a record's numbers from front to back. A read beyond its end returns 0 and sets `bad`.
struct Reader {
  const uint16_t* numbers;
  int at, end;
  bool bad = false;

  __device__ __forceinline__ void refill(bool part, uint32_t& x) {
    const bool empty = part && x < kInitialState;
    const uint32_t lanes = __ballot_sync(kAll, empty);
    if (lanes == 0) return;
    if (empty) {
      const int i = at + __popc(lanes & lanes_below());
      if (i >= end) bad = true;
      x = x << 16 | (i < end ? numbers[i] : 0u);
    }
    at += __popc(lanes);
  }
};

// Steps 2 and 3 for a span's changes.
template <typename Word>
__device__ __forceinline__ void take_values(Word* words, int lanes, int total, const PatchTables& tables,
                                            const PatchArguments& args, Reader& reader, uint32_t& x) {
  const int lane = threadIdx.x;
  for (int first = 0; first < total; first += lanes) {
    const bool part = lane < lanes && first + lane < total;
    int symbol = 0, extra = 0;
    Word* place = nullptr;
    Word old_word = 0;
    if (part) {
      place = words + tables.moving[first + lane];
      old_word = *place;
      const int32_t* ends = tables.ends_of(old_word, args.class_shift);
      const uint32_t rest = x & ((1u << kValueScaleBits) - 1u);
      uint32_t start = 0, end = ends[0];
      // The first two symbols, one up and one down, are by far the most frequent. The last end exceeds every rest.
      while (end <= rest && symbol < patch_symbols(sizeof(Word)) - 1) {
        start = end;
        end = ends[++symbol];
      }
      x = (end - start) * (x >> kValueScaleBits) + rest - start;
      extra = extra_bits(symbol);
    }
    reader.refill(part, x);
    uint64_t bits = 0;
    for (int have = 0; __any_sync(kAll, extra > have); have += 16) {
      const int width = max(0, min(16, extra - have));
      bits |= static_cast<uint64_t>(x & ((1u << width) - 1u)) << have;
      x >>= width;
      reader.refill(width > 0, x);
    }
    if (part) {
      const auto magnitude = static_cast<Word>(magnitude_of(symbol, bits));
      *place = moved(old_word, Change<Word>{symbol % 2 != 0, magnitude}, args.is_float);
    }
  }
}

template <typename Word>
__device__ __forceinline__ bool apply_tile(Word* words, int t, const uint16_t* numbers, int count, PatchTables& tables,
                                           const PatchArguments& args) {
  const int lane = threadIdx.x, lanes = lanes_of(t), span = kSpanRows * lanes;
  if (count < 2 * lanes) return true;
  uint32_t x = kInitialState;
  if (lane < lanes) x = numbers[2 * lane] | static_cast<uint32_t>(numbers[2 * lane + 1]) << 16;
  Reader reader = {numbers, 2 * lanes, count};
  const int lane_end = lane < lanes ? t : 0;  // words from here on are not this lane's
  const auto load = [&](int k) { return k < lane_end ? words[k] : Word{0}; };
  Word next[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) next[i] = load(i * lanes + lane);
  for (int begin = 0; begin < t; begin += span) {
    SpanMasks masks;
#pragma unroll 1
    for (int first = 0; first < kSpanRows; first += kAhead) {
      uint32_t same[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) same[i] = tables.words[2 * class_of(next[i], args.class_shift)].frequency;
      // Safe to load early: only words of the current span are written.
#pragma unroll
      for (int i = 0; i < kAhead; ++i) next[i] = load(begin + (first + kAhead + i) * lanes + lane);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool has_word = begin + (first + i) * lanes + lane < lane_end;
        const uint32_t rest = x & ((1u << kRowScaleBits) - 1u), quotient = x >> kRowScaleBits;
        const bool moves = has_word && rest >= same[i];
        if (has_word) {
          x = (moves ? (1u << kRowScaleBits) - same[i] : same[i]) * quotient + rest - (moves ? same[i] : 0);
        }
        masks.set(first + i, __ballot_sync(kAll, moves));
        reader.refill(has_word, x);
      }
    }
    const int total = tables.list(masks, lanes);
    take_values(words + begin, lanes, total, tables, args, reader, x);
    __syncwarp();  // before the next list overwrites this one
    // The rest of a truncated record need not be decoded.
    if (__any_sync(kAll, reader.bad)) return true;
  }
  return reader.at != count || x != kInitialState;
}

template <typename Word, int Capacity>
__global__ void __launch_bounds__(32) patch_apply_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                         const __grid_constant__ PatchArguments args) {
  __shared__ PatchTables tables;
  const BlockRange range = block_range(table, kPatchTile);
  const int64_t number = table.block_offset + blockIdx.x;
  const uint32_t size = args.sizes[number];
  Word* words = static_cast<Word*>(table.dense[range.segment]) + range.begin;
  const int t = static_cast<int>(range.end - range.begin);
  const int64_t count = size & ~kRawBit;
  const int64_t begin = args.offsets[number], end = args.offsets[number + 1];
  bool bad = begin < 0 || begin > end || end > args.record_bytes || begin % kRecordUnit != 0 ||
             end - begin != count * kRecordUnit;
  if (!bad && size != 0) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(args.records + begin);
    if ((size & kRawBit) != 0) {
      bad = count != raw_numbers<Word>(t);
      if (!bad) copy_raw<Word>(numbers, words, t);
    } else {
      tables.load<Word>(args, range.number);
      bad = apply_tile(words, t, numbers, static_cast<int>(count), tables, args);
    }
  }
  if (bad) {
    atomicMin(reinterpret_cast<unsigned long long*>(args.bad_tile), static_cast<unsigned long long>(number));
  }
}

// The sample, which reads a sixteenth of large tensors. Nearly all words fall into a few classes, so a warp adds up
// equal classes before it adds to shared memory.

constexpr int kFrequentSymbols = 8;  // of changes by less than five, which are nearly all changes

struct ClassCounts {
  uint32_t seen[kClasses], changed[kClasses], symbols[kClasses * kFrequentSymbols];
};

__device__ __forceinline__ void add(int64_t* sum, uint32_t count) {
  if (count != 0) atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(count));
}

// One block for each kSampleStride sample blocks of a tensor: it reads the first of them, or all of a small tensor's.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads)
    patch_sample_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                        const __grid_constant__ PatchArguments args, const __grid_constant__ PatchSample sample) {
  static_assert(kSampleBlock % kThreads == 0, "every thread runs as many iterations");
  __shared__ ClassCounts counts;
  for (int c = threadIdx.x; c < kClasses; c += kThreads) counts.seen[c] = counts.changed[c] = 0;
  const bool one_class = args.class_shift >= kWordBits<Word>;
  const int frequent = one_class ? kFrequentSymbols : kClasses * kFrequentSymbols;
  for (int i = threadIdx.x; i < frequent; i += kThreads) counts.symbols[i] = 0;
  __syncthreads();
  const BlockRange range = block_range(table, kSampleBlock * kSampleStride);
  const auto* old_words = static_cast<const Word*>(table.companions[range.segment]);
  const auto* new_words = static_cast<const Word*>(table.dense[range.segment]);
  const bool all = table.ends[range.segment] <= kSampledNumel;
  const int64_t end = all ? range.end : min(range.end, range.begin + kSampleBlock);
  const int symbols = patch_symbols(sizeof(Word)), lane = threadIdx.x % 32;
  // All lanes of a warp run each iteration, as the votes require.
  for (int64_t first = range.begin + threadIdx.x - lane; first < end; first += kThreads) {
    const int64_t k = first + lane;
    const bool has_word = k < end;
    const Word a = has_word ? old_words[k] : Word{0}, b = has_word ? new_words[k] : Word{0};
    const int of = has_word ? class_of(a, args.class_shift) : -1;
    const uint32_t same = one_class ? __ballot_sync(0xffffffffu, has_word) : __match_any_sync(0xffffffffu, of);
    const uint32_t changed = __ballot_sync(0xffffffffu, a != b);
    if (has_word && __ffs(static_cast<int>(same)) - 1 == lane) {
      atomicAdd(counts.seen + of, __popc(same));
      if ((same & changed) != 0) atomicAdd(counts.changed + of, __popc(same & changed));
    }
    if (a != b) {
      const Change<Word> change = change_of(a, b, args.is_float);
      const Symbol symbol = symbol_of(change.magnitude, change.negative);
      if (symbol.symbol < kFrequentSymbols) {
        atomicAdd(counts.symbols + of * kFrequentSymbols + symbol.symbol, 1u);
      } else {
        add(sample.symbols + of * symbols + symbol.symbol, 1);
      }
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kClasses; c += kThreads) {
    add(sample.seen + range.number * kClasses + c, counts.seen[c]);
    add(sample.changed + range.number * kClasses + c, counts.changed[c]);
  }
  for (int i = threadIdx.x; i < frequent; i += kThreads) {
    add(sample.symbols + i / kFrequentSymbols * symbols + i % kFrequentSymbols, counts.symbols[i]);
  }
}

// Calls launch(table, blocks) with the new tensors, and the old ones as companions; without new tensors the old ones
// are both.
template <typename Launch>
void for_each_patch_table(const PatchArguments& args, int64_t block, Launch launch) {
  for_each_whole_table(args.count, args.new_tensors != nullptr ? args.new_tensors : args.old_tensors, args.old_tensors,
                       args.numels, block, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                         launch(table, blocks);
                         check_launch("patch");
                       });
}

}  // namespace

void patch_sample(const PatchArguments& args, const PatchSample& sample, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_patch_table(args, kSampleBlock * kSampleStride,
                         [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                           patch_sample_kernel<Word><<<blocks, kThreads, 0, stream>>>(table, args, sample);
                         });
  });
}

void encode_to_slots(const PatchArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_patch_table(args, kPatchTile, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
      encode_to_slots_kernel<Word><<<blocks, 32, 0, stream>>>(table, args);
    });
  });
}

void compact_slots(const PatchArguments& args, cudaStream_t stream) {
  compact_slots_kernel<<<static_cast<unsigned>(args.tiles()), kThreads, 0, stream>>>(args);
  check_launch("patch");
}

void encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream) {
  if (overflows == 0) return;
  const auto blocks = static_cast<unsigned>(overflows);
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_patch_table(args, kPatchTile, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned) {
      encode_overflow_kernel<Word><<<blocks, 32, 0, stream>>>(table, args);
    });
  });
}

void patch_apply(const PatchArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_patch_table(args, kPatchTile, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
      patch_apply_kernel<Word><<<blocks, 32, 0, stream>>>(table, args);
    });
  });
}

}  // namespace sparse_opt::cuda
