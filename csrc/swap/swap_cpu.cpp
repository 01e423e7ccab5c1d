// Bytes per active element of a swap: index 2 or 4 (of a run, shared), the compact element read and written; and 64
// read and 64 written for each 64-byte line of the dense tensors that the mask touches.
#include "swap.h"

#include <cstring>

#include "common/blocks.h"

namespace sparse_opt::cpu {
namespace {

// Calls move(dense, block, compact) for each block of the segments, whose elements begin at `compact`.
template <typename Word, typename Move>
void for_each_moved_block(const MoveArguments& args, ParallelFor parallel_for, Move move) {
  const Work work(args.segments);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    work.for_each_stretch(first, last, [&](const Chunk& chunk) {
      void* dense = args.segments.dense[chunk.segment];
      const auto prefetch = [&](const BlockIndices& block) { block.prefetch<Word>(dense); };
      for_each_block(args.segments, chunk, 1, prefetch, [&](const BlockIndices& block) {
        move(dense, block, static_cast<Word*>(args.compact) + block.begin);
      });
    });
  });
}

// The block's elements of a compact buffer in dense_dtype: in place, or rounded to `words`.
const void* rounded(const ReplaceArguments& args, const void* compact, DType dtype, const BlockIndices& block,
                    uint32_t* words) {
  const void* values = at(compact, block.begin, element_size(dtype));
  if (dtype == args.dense_dtype) return values;
  convert_from_float(args.dense_dtype, static_cast<const float*>(values), block.size, words);
  return words;
}

}  // namespace

void indexed_swap(const MoveArguments& args, ParallelFor parallel_for) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_moved_block<Word>(args, parallel_for, [](void* dense, const BlockIndices& block, Word* compact) {
      alignas(64) Word held[kBlock];
      block.gather<Word>(dense, held);
      block.scatter<Word>(dense, compact);
      std::memcpy(compact, held, block.size * sizeof(Word));
    });
  });
}

void indexed_take(const MoveArguments& args, ParallelFor parallel_for) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_moved_block<Word>(args, parallel_for, [](void* dense, const BlockIndices& block, Word* compact) {
      block.gather<Word>(dense, compact);
    });
  });
}

void delta_apply(const MoveArguments& args, ParallelFor parallel_for) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_moved_block<Word>(args, parallel_for, [](void* dense, const BlockIndices& block, Word* compact) {
      block.scatter<Word>(dense, compact);
    });
  });
}

// Bytes per active element: index 2 or 4 (of a run, shared) and the two compact elements; and 64 read and 64 written
// for each 64-byte line of the dense tensors in which an element changes.
void indexed_replace(const ReplaceArguments& args, ParallelFor parallel_for) {
  const Work work(args.segments);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    alignas(64) uint32_t before_words[kBlock], after_words[kBlock];
    work.for_each_stretch(first, last, [&](const Chunk& chunk) {
      // Nothing is prefetched: which lines are written is known only after the comparison.
      for_each_block(
          args.segments, chunk, 1, [](const BlockIndices&) {},
          [&](const BlockIndices& block) {
            const void* before = rounded(args, args.before, args.before_dtype, block, before_words);
            const void* after = rounded(args, args.after, args.after_dtype, block, after_words);
            scatter_changed(element_size(args.dense_dtype), before, after, block, args.segments.dense[chunk.segment]);
          });
    });
  });
}

}  // namespace sparse_opt::cpu
