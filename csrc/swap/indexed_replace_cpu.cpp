// Bytes per active element: index 2 or 4 (of a run, shared) and the two compact elements; and 64 read and 64 written
// for each 64-byte line of the dense tensors in which an element changes.
#include "common/blocks.h"
#include "swap.h"

namespace sparse_opt::cpu {
namespace {

// The block's elements of a compact buffer in dense_dtype: in place, or rounded to `words`.
const void* rounded(const ReplaceArguments& args, const void* compact, DType dtype, const BlockIndices& block,
                    uint32_t* words) {
  const void* values = at(compact, block.begin, element_size(dtype));
  if (dtype == args.dense_dtype) return values;
  convert_from_float(args.dense_dtype, static_cast<const float*>(values), block.size, words);
  return words;
}

}  // namespace

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
