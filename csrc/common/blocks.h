// The stages of the CPU kernels. One thread processes a chunk of a segment in blocks that stay in its caches: gather
// the bits, convert to fp32, compute, convert back, scatter. Only gather and scatter access dense memory, which was
// prefetched some blocks ahead; the other stages are plain loops over arrays, which vectorise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "scalar_types.h"

namespace sparse_opt::cpu {

// Small blocks, so that memory is busy while a block is computed: AdamW of 1.6 of 64 M fp32 elements, call after call,
// took 4.7 ms on two Zen 4 cores with these, 5.4 with blocks of 128, 6.3 with blocks of 512 (docs/dev/notebook.md).
constexpr int64_t kBlock = 64;
constexpr int64_t kBlocksAhead = 6;  // that are prefetched
// If a block is of two dense tensors, a few of its lines are prefetched earlier, so that the translations of its pages'
// addresses are cached when the others are prefetched: 5.8 ms instead of 6.3. With one tensor it costs more than it
// gains.
constexpr int64_t kBlocksAnnounced = 10, kAnnounceEvery = 8;
constexpr int64_t kChunk = 8192;

struct Chunk {
  int64_t segment, begin, end;
};

// Segments cut into chunks, and pieces of consecutive chunks, about kChunk slots each, that one thread processes.
// Neither depends on the number of threads. A small call is one piece, which runs on the calling thread.
struct Work {
  std::vector<Chunk> chunks;
  std::vector<int64_t> pieces;  // piece i is chunks [pieces[i], pieces[i + 1])

  explicit Work(const Segments& segments) {
    int64_t slots = kChunk;
    for (int64_t i = 0; i < segments.count; ++i) {
      for (int64_t begin = segments.starts[i]; begin < segments.ends[i]; begin += kChunk) {
        const Chunk chunk{i, begin, std::min(begin + kChunk, segments.ends[i])};
        slots += chunk.end - chunk.begin;
        if (slots > kChunk) {
          pieces.push_back(static_cast<int64_t>(chunks.size()));
          slots = chunk.end - chunk.begin;
        }
        chunks.push_back(chunk);
      }
    }
    pieces.push_back(static_cast<int64_t>(chunks.size()));
  }

  // Calls call(chunk) for chunks [first, last), with consecutive chunks of a segment as one, because each call begins
  // by waiting for memory.
  template <typename Call>
  void for_each_stretch(int64_t first, int64_t last, Call call) const {
    while (first < last) {
      Chunk stretch = chunks[first];
      while (++first < last && chunks[first].segment == stretch.segment) stretch.end = chunks[first].end;
      call(stretch);
    }
  }

  // body(first, last): chunks [first, last).
  template <typename Body>
  void run(ParallelFor parallel_for, Body body) const {
    parallel_for(static_cast<int64_t>(pieces.size()) - 1,
                 [&](int64_t first, int64_t last) { body(pieces[first], pieces[last]); });
  }
};

// One prefetch for each element: duplicates are cheaper than a branch that avoids them. Into L2, which allows more
// misses in flight than L1: on one Zen 4 core a gather of 2.5 % of 64 M fp32 took 6 ms this way, 12 ms with prefetches
// into L1 next to the loads, and 13 ms without.
template <typename Word, typename Index>
void prefetch_words(const Word* dense, const Index* indices, int64_t n, int64_t every) {
  for (int64_t k = 0; k < n; k += every) __builtin_prefetch(dense + indices[k], 0, 2);
  asm volatile("");  // GCC regards a function that only prefetches as one without effect, and drops the call
}

template <typename Word, typename Index>
void gather_words(const Word* dense, const Index* indices, int64_t n, Word* out) {
  for (int64_t k = 0; k < n; ++k) out[k] = dense[indices[k]];
}

template <typename Word, typename Index>
void scatter_words(Word* dense, const Index* indices, int64_t n, const Word* values) {
  for (int64_t k = 0; k < n; ++k) dense[indices[k]] = values[k];
}

// With the processor's gather and scatter if it has AVX-512: 4.7 ms for the same gather, loops took 7.3.
void gather_words(const uint32_t* dense, const int32_t* indices, int64_t n, uint32_t* out);
void scatter_words(uint32_t* dense, const int32_t* indices, int64_t n, const uint32_t* values);

// The indices of one block, compact slots [begin, begin + size).
struct BlockIndices {
  const void* indices;  // of the call
  const void* first;    // the block's first, int32 or int64
  bool wide;
  int run_length;
  int64_t begin, size;
  int64_t every = 1;  // prefetch every so many; runs are prefetched only if it is 1

  // call(pointer to the block's first index)
  template <typename Call>
  void with_indices(Call call) const {
    if (wide) {
      call(static_cast<const int64_t*>(first));
    } else {
      call(static_cast<const int32_t*>(first));
    }
  }

  template <typename Word>
  void prefetch(const void* dense) const {
    if (run_length > 1) return every == 1 ? prefetch_runs(static_cast<const Word*>(dense)) : void();
    with_indices([&](auto* at) { prefetch_words(static_cast<const Word*>(dense), at, size, every); });
  }

  template <typename Word>
  void gather(const void* dense, void* out) const {
    if (run_length > 1) return gather_runs(static_cast<const Word*>(dense), static_cast<Word*>(out));
    with_indices([&](auto* at) { gather_words(static_cast<const Word*>(dense), at, size, static_cast<Word*>(out)); });
  }

  template <typename Word>
  void scatter(void* dense, const void* values) const {
    if (run_length > 1) return scatter_runs(static_cast<Word*>(dense), static_cast<const Word*>(values));
    with_indices(
        [&](auto* at) { scatter_words(static_cast<Word*>(dense), at, size, static_cast<const Word*>(values)); });
  }

  // Calls call(position in the dense tensor, place in the block, length) for each run, cut at the block's ends. The
  // functions for runs are not inlined, so that they do not change the code for masks of single elements.
  template <typename Call>
  void for_each_run(Call call) const {
    const int shift = __builtin_ctz(static_cast<unsigned>(run_length));
    for (int64_t k = 0; k < size;) {
      const int64_t run = (begin + k) >> shift, skip = (begin + k) & (run_length - 1);
      const int64_t start =
          wide ? static_cast<const int64_t*>(indices)[run] : static_cast<const int32_t*>(indices)[run];
      const int64_t length = std::min(run_length - skip, size - k);
      call(start + skip, k, length);
      k += length;
    }
  }

  template <typename Word>
  [[gnu::noinline]] void prefetch_runs(const Word* dense) const {
    constexpr int64_t kLine = 64 / sizeof(Word);
    for_each_run([&](int64_t position, int64_t, int64_t length) {
      for (int64_t k = 0; k < length; k += kLine) __builtin_prefetch(dense + position + k, 0, 2);
    });
    asm volatile("");  // as in prefetch_words
  }

  template <typename Word>
  [[gnu::noinline]] void gather_runs(const Word* dense, Word* out) const {
    for_each_run([&](int64_t position, int64_t k, int64_t length) {
      std::memcpy(out + k, dense + position, length * sizeof(Word));
    });
  }

  // Only the words that differ.
  template <typename Word>
  void scatter_changed(void* dense, const Word* before, const Word* after) const {
    Word* to = static_cast<Word*>(dense);
    const auto write = [&](int64_t position, int64_t k) {
      if (before[k] != after[k]) to[position] = after[k];
    };
    if (run_length > 1) {
      for_each_run([&](int64_t position, int64_t first, int64_t length) {
        for (int64_t k = 0; k < length; ++k) write(position + k, first + k);
      });
    } else {
      with_indices([&](auto* positions) {
        for (int64_t k = 0; k < size; ++k) write(positions[k], k);
      });
    }
  }

  template <typename Word>
  [[gnu::noinline]] void scatter_runs(Word* dense, const Word* values) const {
    for_each_run([&](int64_t position, int64_t k, int64_t length) {
      std::memcpy(dense + position, values + k, length * sizeof(Word));
    });
  }
};

// positions[k] = the position of compact slot begin + k, for indices of two bytes.
void widen(const Segments& segments, int64_t segment, int64_t begin, int64_t size, int32_t* positions);

// Calls body(block) for the blocks of a chunk, and before it prefetch(block), of `tensors` dense tensors, for later
// blocks. Prefetching continues into the next chunk, which is likely this thread's, too.
template <typename Prefetch, typename Body>
void for_each_block(const Segments& segments, const Chunk& chunk, int tensors, Prefetch prefetch, Body body) {
  constexpr int64_t kHeld = 16;
  static_assert(kBlocksAhead < kBlocksAnnounced && kBlocksAnnounced < kHeld);
  alignas(64) int32_t positions[kHeld][kBlock];  // of the blocks from the current to the last announced one
  const int64_t segment_end = segments.ends[chunk.segment];
  const bool narrow = segments.index_type == IndexType::kOffset16, wide = segments.index_type == IndexType::kInt64;
  const auto block_of = [&](int64_t i, int64_t end) {
    const int64_t begin = chunk.begin + i * kBlock;
    const void* stored = static_cast<const char*>(segments.indices) + begin * (wide ? 8 : 4);
    const void* first = narrow ? positions[i % kHeld] : stored;
    return BlockIndices{segments.indices, first, wide, segments.run_length, begin, std::min(kBlock, end - begin)};
  };
  const auto exists = [&](int64_t i) { return chunk.begin + i * kBlock < segment_end; };
  const auto announce = [&](int64_t i) {
    if (!exists(i)) return;
    BlockIndices block = block_of(i, segment_end);
    if (narrow) widen(segments, chunk.segment, block.begin, block.size, positions[i % kHeld]);
    if (tensors == 1) return;
    block.every = kAnnounceEvery;
    prefetch(block);
  };
  const int64_t announced = tensors == 1 ? kBlocksAhead : kBlocksAnnounced;
  const auto prefetch_block = [&](int64_t i) {
    if (exists(i)) prefetch(block_of(i, segment_end));
  };
  for (int64_t i = 0; i < announced; ++i) announce(i);
  for (int64_t i = 0; i < kBlocksAhead; ++i) prefetch_block(i);
  for (int64_t i = 0; chunk.begin + i * kBlock < chunk.end; ++i) {
    announce(i + announced);
    prefetch_block(i + kBlocksAhead);
    body(block_of(i, chunk.end));
  }
}

inline const void* at(const void* data, int64_t position, int64_t element_size) {
  return static_cast<const char*>(data) + position * element_size;
}

inline void* at(void* data, int64_t position, int64_t element_size) {
  return static_cast<char*>(data) + position * element_size;
}

// Convert n <= kBlock elements of `dtype` to fp32 and back.
void convert_to_float(DType dtype, const void* values, int64_t n, float* out);
void convert_from_float(DType dtype, const float* values, int64_t n, void* out);
void round_stochastically(DType dtype, const float* values, const uint32_t* random, int64_t n, void* out);

inline void prefetch(DType dtype, const void* dense, const BlockIndices& block) {
  if (dtype == DType::kFloat32) {
    block.prefetch<uint32_t>(dense);
  } else {
    block.prefetch<uint16_t>(dense);
  }
}

// out[k] = fp32 of dense[indices[k]], and the reverse. `random` [n] may be null, for rounding to nearest.
void gather_halves(DType dtype, const void* dense, const BlockIndices& block, float* out);
void scatter_halves(DType dtype, const float* values, const uint32_t* random, const BlockIndices& block, void* dense);

inline void gather_as_float(DType dtype, const void* dense, const BlockIndices& block, float* out) {
  if (dtype != DType::kFloat32) return gather_halves(dtype, dense, block, out);
  block.gather<uint32_t>(dense, out);
}

inline void scatter_changed(int element_size, const void* before, const void* after, const BlockIndices& block,
                            void* dense) {
  if (element_size == 4) {
    block.scatter_changed(dense, static_cast<const uint32_t*>(before), static_cast<const uint32_t*>(after));
  } else {
    block.scatter_changed(dense, static_cast<const uint16_t*>(before), static_cast<const uint16_t*>(after));
  }
}

inline void scatter_from_float(DType dtype, const float* values, const uint32_t* random, const BlockIndices& block,
                               void* dense) {
  if (dtype != DType::kFloat32) return scatter_halves(dtype, values, random, block, dense);
  block.scatter<uint32_t>(dense, values);
}

}  // namespace sparse_opt::cpu
