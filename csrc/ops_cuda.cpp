#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/hash.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>

#include "kernels/cuda/kernels.h"
#include "native.h"
#include "step_op.h"

namespace sparse_opt {
namespace {

struct Cuda {
  using Guard = c10::cuda::CUDAGuard;

  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

  template <typename Rule>
  static void step(const StepArguments& args, const typename Rule::Options& options) {
    using TensorScalars = typename Rule::TensorScalars;
    const at::Tensor tensors = float_scratch(args.segments.count * (sizeof(TensorScalars) / sizeof(float)));
    cuda::step<Rule>(args, options, static_cast<TensorScalars*>(tensors.data_ptr()), stream());
  }
  static void run(const GatherArguments& args) {
    if (args.sum_sq == nullptr) return cuda::masked_grad_gather(args, nullptr, nullptr, stream());
    std::vector<int64_t> first{0};
    for (int64_t i = 0; i < args.segments.count; ++i) {
      first.push_back(first.back() + gather_blocks(args.segments.starts[i], args.segments.ends[i]));
    }
    const at::Tensor partial_sums = float_scratch(first.back());
    cuda::masked_grad_gather(args, at_each(partial_sums, first).data(), nullptr, stream());
    cuda::sum_partials(args.segments, partial_sums.const_data_ptr<float>(), args.sum_sq, stream());
  }
  static void run(const TileArguments& args) {
    if (args.sum_sq == nullptr) return cuda::tile_weight_grad(args, nullptr, nullptr, stream());
    cuda::tile_weight_grad(args, float_scratch(args.active()).mutable_data_ptr<float>(), nullptr, stream());
  }
  static std::vector<const void*> at_each(const at::Tensor& floats, at::IntArrayRef offsets) {
    std::vector<const void*> pointers;
    for (const int64_t offset : offsets) pointers.push_back(floats.mutable_data_ptr<float>() + offset);
    return pointers;
  }
  // Freed on return; the allocator keeps the order of the stream.
  static at::Tensor float_scratch(int64_t n) {
    return at::empty({n}, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat));
  }
  static void run_swap(const MoveArguments& args) { cuda::indexed_swap(args, stream()); }
  static void run_take(const MoveArguments& args) { cuda::indexed_take(args, stream()); }
  static void run_apply(const MoveArguments& args) { cuda::delta_apply(args, stream()); }

  // Memory for the changes is allocated before their number is known. Small tensors: for as many changes as elements.
  // Else, speculatively, for the last call's number for this size, so that the GPU does not wait for the host. If there
  // was no such call, or the sample shows more changes, for the number that the sample predicts.
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> run(DeltaCall& call) {
    DeltaArguments& args = call.args;
    const int64_t numel = std::accumulate(call.numels.begin(), call.numels.end(), int64_t{0});
    const int64_t change_bytes = args.element_size + (args.wide_indices ? 8 : 4);
    const at::Tensor progress = at::empty({cuda::delta_progress_bytes(args)}, call.options(at::kByte));
    const at::Tensor bounds = host_memory(args.count, at::kLong), counts = at::empty({args.count}, at::kLong);
    at::Tensor indices, values;
    const auto encode = [&](int64_t capacity) {
      indices = values = at::Tensor();
      std::tie(indices, values) = call.allocate(std::min(numel, capacity));
      cuda::delta_encode(args, stream());
    };
    args.progress = progress.data_ptr();
    args.bounds = bounds.mutable_data_ptr<int64_t>();
    std::fill(args.bounds, args.bounds + args.count, kNotWritten);
    cuda::delta_prepare(args, stream());
    std::atomic<int64_t>& last = last_found(call.device(), numel);
    if (numel * change_bytes <= kSmallCapacity) {
      encode(numel);
    } else {
      const Sample sample(call);
      const int64_t found = last.load(std::memory_order_relaxed), guess = found + found / 8 + 16384;
      // A guess that is too high over-allocates by at most numel / 8.
      args.speculative = found > 0 && guess <= numel / 8;
      if (args.speculative) encode(guess);
      if (!args.speculative || sample.estimate() > args.capacity) {
        args.speculative = false;
        encode(sample.upper_estimate());
      }
    }
    const int64_t total = read_counts(call, counts.mutable_data_ptr<int64_t>());
    if (total > args.capacity) {
      args.speculative = false;
      std::fill(args.bounds, args.bounds + args.count, kNotWritten);
      cuda::delta_prepare(args, stream());
      encode(total);
      read_counts(call, counts.mutable_data_ptr<int64_t>());
    }
    last.store(total + 1, std::memory_order_relaxed);
    // The returned tensors should not keep much unused memory allocated.
    const bool oversized = total < args.capacity - args.capacity / 4;
    indices.resize_({total});
    values.resize_({total});
    return {oversized ? indices.clone() : indices, oversized ? values.clone() : values, counts};
  }

 private:
  static constexpr int64_t kSmallCapacity = int64_t{64} << 20;  // bytes
  static constexpr int kNotWritten = -1;                        // in the host's memory, until the GPU writes there

  // Polls `word`, in the host's memory, until the GPU has written it, which may be before its kernel ends: later work
  // on the stream waits for that, and the host need not.
  template <typename T>
  static T poll(const T* word) {
    constexpr int kPollsPerQuery = 4096;
    for (int polls = 1;; ++polls) {
      const T found = *static_cast<const volatile T*>(word);
      if (found != kNotWritten) return found;
      if (polls % kPollsPerQuery != 0) continue;
      const cudaError_t state = cudaStreamQuery(stream());
      if (state == cudaErrorNotReady) continue;
      C10_CUDA_CHECK(state);
      TORCH_INTERNAL_ASSERT(*static_cast<const volatile T*>(word) != kNotWritten,
                            "delta_encode: a kernel wrote nothing");
    }
  }

  // Writes the number of changes of each tensor, and returns that of all.
  static int64_t read_counts(const DeltaCall& call, int64_t* counts) {
    int64_t total = 0;
    for (int64_t i = 0; i < call.args.count; ++i) {
      const int64_t end =
          call.numels[i] == 0 ? total : poll(call.args.bounds + i);  // those of empty ones are not written
      counts[i] = end - total;
      total = end;
    }
    return total;
  }

  static at::Tensor host_memory(int64_t n, at::ScalarType dtype) {
    return at::empty({n}, at::TensorOptions().dtype(dtype).pinned_memory(true));
  }

  // One more than the number of changes in the last call for this device and numel; 0 before the first. Several sizes
  // may share an entry, because it only serves as a guess.
  static std::atomic<int64_t>& last_found(const at::Device& device, int64_t numel) {
    static std::array<std::atomic<int64_t>, 256> found;
    return found[c10::get_hash(device.index(), numel) % found.size()];
  }

  // The number of changes in every kStride-th block, which the GPU writes to the host's memory.
  class Sample {
   public:
    explicit Sample(DeltaCall& call) : counts_(host_memory(call.blocks() / kStride + call.args.count + 1, at::kInt)) {
      int* count = counts_.mutable_data_ptr<int>();
      std::fill(count, count + counts_.numel(), kNotWritten);
      call.args.sample_stride = kStride;
      call.args.sampled = count;
      size_ = cuda::delta_sample(call.args, stream());
    }

    Sample(const Sample&) = delete;
    // The memory may be reused after this, so the GPU must be done with it, also after an error.
    ~Sample() {
      if (!complete_) cudaStreamSynchronize(stream());
    }

    int64_t estimate() const { return kStride * found(); }

    // The estimate plus six per cent and eight standard deviations, as if the changes were independent.
    int64_t upper_estimate() const {
      const auto found = static_cast<double>(this->found());
      return static_cast<int64_t>(kStride * (1.0625 * found + 8.0 * std::sqrt(found) + 1024.0));
    }

   private:
    static constexpr int64_t kStride = 512;
    at::Tensor counts_;
    int64_t size_;
    mutable bool complete_ = false;

    int64_t found() const {
      int64_t found = 0;
      for (int64_t i = 0; i < size_; ++i) found += poll(counts_.const_data_ptr<int>() + i);
      complete_ = true;
      return found;
    }
  };
};

// masked_grad_gather_ for a list of `of` tensors that several calls gather: this one gathers those with the given
// `numbers`. Tensor i's partial sums are written to `partial_sums`, of the whole list, from first_partials[i] on.
void gather_partly_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                    at::IntArrayRef ends, at::IntArrayRef numbers, int64_t of, bool accumulate,
                    const at::Tensor& partial_sums, at::IntArrayRef first_partials, const OptionalTensor& found_inf,
                    int64_t run_length, const OptionalTensor& index_bases) {
  const at::Device device = indices.device();
  const auto pointers = list_data("dense", dense, device);
  GatherArguments args;
  args.segments = checked_segments("dense", dense, pointers, indices, starts, ends, run_length, index_bases, of);
  if (!dense.empty()) args.dense_dtype = dtype_of("dense[0]", dense[0]);
  check_flat("out", out, checked_slots(indices, run_length), device);
  args.out_dtype = dtype_of("out", out);
  args.out = out.data_ptr();
  args.accumulate = accumulate;
  args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  check_dtype("partial_sums", partial_sums, at::kFloat);
  SPARSE_OPT_CHECK(numbers.size() == dense.size() && first_partials.size() == dense.size(), "dense holds ",
                   dense.size(), " tensors, and there are ", numbers.size(), " numbers and ", first_partials.size(),
                   " first_partials");
  for (size_t i = 0; i < dense.size(); ++i) {
    const int64_t blocks = gather_blocks(starts[i], ends[i]);
    SPARSE_OPT_CHECK(0 <= numbers[i] && numbers[i] < of, "numbers[", i, "] is ", numbers[i], ", expected less than ",
                     of);
    SPARSE_OPT_CHECK(0 <= first_partials[i] && first_partials[i] + blocks <= partial_sums.numel(), "partial_sums has ",
                     partial_sums.numel(), " elements, expected ", blocks, " from ", first_partials[i], " on");
  }
  const Cuda::Guard guard(device);
  cuda::masked_grad_gather(args, Cuda::at_each(partial_sums, first_partials).data(), numbers.data(), Cuda::stream());
}

// tile_weight_grad_ for some weights of a list, as gather_partly_: the partial sums of weight i are written to those of
// the whole list from first_partials[i] on.
void tile_weight_grad_partly_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                              const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                              bool accumulate, const at::Tensor& partial_sums, at::IntArrayRef first_partials,
                              const OptionalTensor& found_inf) {
  const TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, accumulate, found_inf);
  check_dtype("partial_sums", partial_sums, at::kFloat);
  SPARSE_OPT_CHECK(first_partials.size() == starts.size(), "there are ", first_partials.size(),
                   " first_partials, expected ", starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    SPARSE_OPT_CHECK(0 <= first_partials[i] && first_partials[i] + (ends[i] - starts[i]) <= partial_sums.numel(),
                     "partial_sums has ", partial_sums.numel(), " elements, expected ", ends[i] - starts[i], " from ",
                     first_partials[i], " on");
  }
  const Cuda::Guard guard(tiles.device());
  cuda::tile_weight_grad(call.args, partial_sums.mutable_data_ptr<float>(), first_partials.data(), Cuda::stream());
}

// For bench/kernels/sanitize_ops.py, which makes sure that its calls use clusters.
int64_t tile_weight_grad_parts(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                               const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends,
                               int64_t tile_size) {
  const TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, false, std::nullopt);
  const Cuda::Guard guard(tiles.device());
  return cuda::tile_weight_grad_parts(call.args);
}

void add_partial_sums_(const at::Tensor& sum_sq, const at::Tensor& partial_sums, at::IntArrayRef starts,
                       at::IntArrayRef ends) {
  const std::vector<void*> no_tensors(starts.size(), nullptr);
  Segments segments;
  segments.count = static_cast<int64_t>(starts.size());
  segments.dense = no_tensors.data();
  segments.starts = starts.data();
  segments.ends = ends.data();
  float* sums = float_data("sum_sq", sum_sq, segments.count, partial_sums.device());
  const Cuda::Guard guard(partial_sums.device());
  cuda::sum_partials(segments, partial_sums.const_data_ptr<float>(), sums, Cuda::stream());
}

}  // namespace
}  // namespace sparse_opt

TORCH_LIBRARY_IMPL(sparse_opt_native, CUDA, m) {
  sparse_opt::implement_ops<sparse_opt::Cuda>(m);
  sparse_opt::implement_steps<sparse_opt::Cuda>(m);
  m.impl("gather_partly_", &sparse_opt::gather_partly_);
  m.impl("tile_weight_grad_partly_", &sparse_opt::tile_weight_grad_partly_);
  m.impl("tile_weight_grad_parts", &sparse_opt::tile_weight_grad_parts);
  m.impl("add_partial_sums_", &sparse_opt::add_partial_sums_);
}
