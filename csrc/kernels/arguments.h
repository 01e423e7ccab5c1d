// The arguments of the launchers of both devices: raw pointers and sizes, already checked.
#pragma once

#include <cstdint>

namespace sparse_opt {

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

inline int element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

enum class IndexType : int { kInt32, kInt64, kOffset16 };

inline int index_size(IndexType type) {
  return type == IndexType::kInt64 ? 8 : type == IndexType::kInt32 ? 4 : 2;
}

constexpr int64_t kIndexFrame = 256;  // slots that share a base

// Segment i, the compact slots [starts[i], ends[i]), belongs to dense tensor i. The position of slot s in it is
// indices[s / run_length] + s % run_length, where starts and ends are multiples of run_length, a power of two; or, with
// index_bases and a run_length of 1, index_bases[s / kIndexFrame + i] + indices[s]. Positions may have any alignment.
// The lists are in host memory.
struct Segments {
  int64_t count = 0;
  int64_t numel = 0;                // of all dense tensors
  void* const* dense = nullptr;     // [count]
  const int64_t* starts = nullptr;  // [count]
  const int64_t* ends = nullptr;    // [count]
  const void* indices = nullptr;    // [nnz / run_length] of index_type
  IndexType index_type = IndexType::kInt32;
  int run_length = 1;
  const int32_t* index_bases = nullptr;  // [nnz / kIndexFrame + count], with kOffset16
};

constexpr int kMaxStates = 2;  // of an optimizer: one step draws random words for so many (rounding.h)

// The arguments of a step that do not depend on the optimizer. Exactly one of grad and dense_grads is given; null is
// "not given" for the rest.
struct StepArguments {
  Segments segments;
  DType param_dtype = DType::kFloat32;
  DType grad_dtype = DType::kFloat32;
  DType state_dtype = DType::kFloat32;
  void* states[kMaxStates] = {};       // [nnz] each, as Rule::kStates lists them; null if not used
  const void* grad = nullptr;          // [nnz]
  void* const* dense_grads = nullptr;  // [count], the list in host memory
  float* master = nullptr;             // [nnz]
  void* weights = nullptr;            // [nnz] of param_dtype: a copy of the parameters' active elements; no master then
  bool params_hold_master = false;    // the parameters' active elements are the rounded masters
  const float* lr = nullptr;          // [1]
  float* steps = nullptr;             // [count], 1 in the first step
  bool count_steps = false;           // add 1 to `steps` first, unless found_inf
  const float* clip_coef = nullptr;   // [1]
  const float* grad_scale = nullptr;  // [1]
  const float* found_inf = nullptr;   // [1]
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

// The slots of one partial sum of squares in a GPU's gather. Blocks begin at multiples of 32 slots.
constexpr int64_t kGatherBlock = 1024;

inline int64_t gather_blocks(int64_t start, int64_t end) {
  return end > start ? (end - (start & ~int64_t{31}) + kGatherBlock - 1) / kGatherBlock : 0;
}

// The global norm of gradients and the factor that clips them to max_norm, at most 1, as in torch's clip_grad_norm_.
// All on the device.
struct ClipArguments {
  float max_norm = 0.0f;
  float* norm = nullptr;         // [1]
  float* coefficient = nullptr;  // [1]
  uint32_t* finished = nullptr;  // [1], 0 before and after a call
};

struct GatherArguments {
  Segments segments;
  DType dense_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  void* out = nullptr;           // [nnz]
  const float* scale = nullptr;  // [1], may be null
  bool accumulate = false;
  float* sum_sq = nullptr;     // [count], may be null
  float* found_inf = nullptr;  // [1], may be null
};

// Tiles of the weight gradients [rows[i], columns[i]] = grad_outputs[i]^T inputs[i], of contiguous operands. A row of
// `tiles` holds a tile's first row, first column, first slot, and the slots from one of its rows to the next. Matrix i
// has tiles [starts[i], ends[i]). Lists are in host memory.
struct TileArguments {
  int64_t count = 0;
  void* const* grad_outputs = nullptr;  // [count], [tokens, rows] each
  void* const* inputs = nullptr;        // [count], [tokens, columns] each
  const int64_t* tokens = nullptr;      // [count]
  const int64_t* rows = nullptr;        // [count]
  const int64_t* columns = nullptr;     // [count]
  const int64_t* starts = nullptr;      // [count]
  const int64_t* ends = nullptr;        // [count]
  const int64_t* tiles = nullptr;       // [tiles, 4], on the device
  int tile_size = 0;                    // 64 or 128
  DType dtype = DType::kFloat32;        // of grad_outputs and inputs
  DType out_dtype = DType::kFloat32;
  void* out = nullptr;           // [nnz]
  const float* scale = nullptr;  // [1], may be null
  bool accumulate = false;
  float* sum_sq = nullptr;     // [count], may be null
  float* found_inf = nullptr;  // [1], may be null

  int64_t active() const {
    int64_t n = 0;
    for (int64_t i = 0; i < count; ++i) n += ends[i] - starts[i];
    return n;
  }
};

// Moves bits between dense[indices] and a compact buffer.
struct MoveArguments {
  Segments segments;
  void* compact = nullptr;  // [nnz]
  int element_size = 0;     // 1, 2, 4 or 8
};

// Writes `after`, rounded to dense_dtype, to dense[indices] where its bits differ from those of `before`, which dense
// holds. Each of the two is [nnz] of dense_dtype or fp32.
struct ReplaceArguments {
  Segments segments;
  DType dense_dtype = DType::kFloat32;
  DType before_dtype = DType::kFloat32;
  DType after_dtype = DType::kFloat32;
  const void* before = nullptr;
  const void* after = nullptr;
};

// Elements of a block, all of one tensor. A CPU marks and counts the changes of each block, then writes them at
// the running sum of the counts; a GPU samples blocks.
constexpr int64_t kDeltaBlock = 8192;
constexpr int64_t kDeltaBlockBytes = kDeltaBlock / 8;

struct DeltaArguments {
  int64_t count = 0;
  void* const* old_tensors = nullptr;    // [count], the list in host memory
  void* const* new_tensors = nullptr;    // [count], the list in host memory
  const int64_t* numels = nullptr;       // [count], in host memory
  const int64_t* first_block = nullptr;  // [count + 1], in host memory: tensor i has blocks [first[i], first[i + 1])
  int element_size = 0;                  // 1, 2, 4 or 8
  bool wide_indices = false;
  int64_t capacity = 0;      // of indices and values
  bool speculative = false;  // capacity was chosen before the sample was known (GPU)
  void* indices = nullptr;   // [capacity] int32, or int64 if wide_indices
  void* values = nullptr;    // [capacity]

  // Scratch memory of a CPU. `changed` has one bit for each element: element k of a block is bit k % 8 of byte k / 8.
  // Elements past a tensor's end count as unchanged.
  uint8_t* changed = nullptr;             // [blocks * kDeltaBlockBytes]
  int64_t* block_counts = nullptr;        // [blocks]
  const int64_t* running_sums = nullptr;  // [blocks], of block_counts, inclusive

  void* progress = nullptr;  // scratch memory of a GPU, of delta_progress_bytes()
  // In pinned memory of the host, which the GPU writes, so that no copy is needed between kernels.
  int64_t* bounds = nullptr;  // [count], the running sum at each tensor's end
  int64_t sample_stride = 1;
  int* sampled = nullptr;  // [blocks / sample_stride + tables], changes of every sample_stride-th block of a table
};

}  // namespace sparse_opt
