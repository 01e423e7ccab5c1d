#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>

#include "cuda_stream.h"
#include "ops.h"

namespace sparse_opt {
namespace {

struct Cuda {
  template <typename Rule>
  static void step(const StepArguments& args, const void* options, int device) {
    using TensorScalars = typename Rule::TensorScalars;
    const OnStream stream(device);
    const Tensor tensors = float_scratch(args.segments.count * (sizeof(TensorScalars) / sizeof(float)), device);
    cuda::step<Rule>(args, *static_cast<const typename Rule::Options*>(options),
                     static_cast<TensorScalars*>(tensors.data_ptr()), stream);
  }
  static void gather(const GatherArguments& args, int device) {
    const OnStream stream(device);
    if (args.sum_sq == nullptr) return cuda::masked_grad_gather(args, nullptr, nullptr, stream);
    std::vector<int64_t> first{0};
    for (int64_t i = 0; i < args.segments.count; ++i) {
      first.push_back(first.back() + gather_blocks(args.segments.starts[i], args.segments.ends[i]));
    }
    const Tensor partial_sums = float_scratch(first.back(), device);
    auto* sums = static_cast<float*>(partial_sums.data_ptr());
    cuda::masked_grad_gather(args, at_each(sums, first).data(), nullptr, stream);
    cuda::sum_partials(args.segments, sums, args.sum_sq, {}, stream);
  }
  static void tiles(const TileArguments& args, int device) {
    const OnStream stream(device);
    if (args.sum_sq == nullptr) return cuda::tile_weight_grad(args, nullptr, nullptr, stream);
    const Tensor sums = float_scratch(args.active(), device);
    cuda::tile_weight_grad(args, static_cast<float*>(sums.data_ptr()), nullptr, stream);
  }
  static void gather_partly(const GatherArguments& args, float* partial_sums, const int64_t* first_partials,
                            const int64_t* numbers, int device) {
    const Ints first(first_partials, static_cast<size_t>(args.segments.count));
    cuda::masked_grad_gather(args, at_each(partial_sums, first).data(), numbers, OnStream(device));
  }
  static void tiles_partly(const TileArguments& args, float* partial_sums, const int64_t* first_partials, int device) {
    cuda::tile_weight_grad(args, partial_sums, first_partials, OnStream(device));
  }
  static void sum_partials(const Segments& segments, const float* partial_sums, float* sum_sq,
                           const ClipArguments& clip, int device) {
    cuda::sum_partials(segments, partial_sums, sum_sq, clip, OnStream(device));
  }
  static std::vector<const void*> at_each(float* floats, Ints offsets) {
    std::vector<const void*> pointers;
    for (const int64_t offset : offsets) pointers.push_back(floats + offset);
    return pointers;
  }
  // Freed on return; the allocator keeps the order of the stream.
  static Tensor float_scratch(int64_t n, int device) {
    return empty({n}, ScalarType::Float, {DeviceType::CUDA, device});
  }
  static void swap(const MoveArguments& args, int device) { cuda::indexed_swap(args, OnStream(device)); }
  static void replace(const ReplaceArguments& args, int device) { cuda::indexed_replace(args, OnStream(device)); }
  static void take(const MoveArguments& args, int device) { cuda::indexed_take(args, OnStream(device)); }
  static void apply(const MoveArguments& args, int device) { cuda::delta_apply(args, OnStream(device)); }

  // Memory for the changes is allocated before their number is known. Small tensors: for as many changes as elements.
  // Else, speculatively, for the last call's number for this size, so that the GPU does not wait for the host. If there
  // was no such call, or the sample shows more changes, for the number that the sample predicts.
  static std::tuple<Tensor, Tensor, Tensor> encode(DeltaCall& call) {
    const OnStream stream(call.device.index);
    DeltaArguments& args = call.args;
    const int64_t numel = std::accumulate(call.numels.begin(), call.numels.end(), int64_t{0});
    const int64_t change_bytes = args.element_size + (args.wide_indices ? 8 : 4);
    const Tensor progress = empty({cuda::delta_progress_bytes(args)}, ScalarType::Byte, call.device);
    const Tensor bounds = host_memory(args.count, ScalarType::Long), counts = empty({args.count}, ScalarType::Long, {});
    std::optional<Tensor> indices, values;
    const auto encode = [&](int64_t capacity) {
      indices = values = std::nullopt;  // freed before the next are allocated
      std::tie(indices, values) = call.allocate(std::min(numel, capacity));
      cuda::delta_encode(args, stream);
    };
    args.progress = progress.data_ptr();
    args.bounds = bounds.mutable_data_ptr<int64_t>();
    std::fill(args.bounds, args.bounds + args.count, kNotWritten);
    cuda::delta_prepare(args, stream);
    std::atomic<int64_t>& last = last_found(call.device.index, numel);
    if (numel * change_bytes <= kSmallCapacity) {
      encode(numel);
    } else {
      const Sample sample(call, stream);
      const int64_t found = last.load(std::memory_order_relaxed), guess = found + found / 8 + 16384;
      // A guess that is too high over-allocates by at most numel / 8.
      args.speculative = found > 0 && guess <= numel / 8;
      if (args.speculative) encode(guess);
      if (!args.speculative || sample.estimate() > args.capacity) {
        args.speculative = false;
        encode(sample.upper_estimate());
      }
    }
    const int64_t total = read_counts(call, stream, counts.mutable_data_ptr<int64_t>());
    if (total > args.capacity) {
      args.speculative = false;
      std::fill(args.bounds, args.bounds + args.count, kNotWritten);
      cuda::delta_prepare(args, stream);
      encode(total);
      read_counts(call, stream, counts.mutable_data_ptr<int64_t>());
    }
    last.store(total + 1, std::memory_order_relaxed);
    // The returned tensors should not keep much unused memory allocated.
    const bool oversized = total < args.capacity - args.capacity / 4;
    const auto result = [&](Tensor& found) {
      found = call_torch("aten::resize_", "", found, std::vector<int64_t>{total}, std::nullopt);
      return oversized ? torch::stable::clone(found) : found;
    };
    return {result(*indices), result(*values), counts};
  }

 private:
  static constexpr int64_t kSmallCapacity = int64_t{64} << 20;  // bytes
  static constexpr int kNotWritten = -1;                        // in the host's memory, until the GPU writes there

  // Polls `word`, in the host's memory, until the GPU has written it, which may be before its kernel ends: later work
  // on the stream waits for that, and the host need not.
  template <typename T>
  static T poll(const T* word, cudaStream_t stream) {
    constexpr int kPollsPerQuery = 4096;
    for (int polls = 1;; ++polls) {
      const T found = *static_cast<const volatile T*>(word);
      if (found != kNotWritten) return found;
      if (polls % kPollsPerQuery != 0) continue;
      const cudaError_t state = cudaStreamQuery(stream);
      if (state == cudaErrorNotReady) continue;
      check_cuda(state);
      if (*static_cast<const volatile T*>(word) == kNotWritten) {
        throw std::logic_error("delta_encode: a kernel wrote nothing");
      }
    }
  }

  // Writes the number of changes of each tensor, and returns that of all.
  static int64_t read_counts(const DeltaCall& call, cudaStream_t stream, int64_t* counts) {
    int64_t total = 0;
    for (int64_t i = 0; i < call.args.count; ++i) {
      const int64_t end =
          call.numels[i] == 0 ? total : poll(call.args.bounds + i, stream);  // those of empty ones are not written
      counts[i] = end - total;
      total = end;
    }
    return total;
  }

  // One more than the number of changes in the last call for this device and numel; 0 before the first. Several sizes
  // may share an entry, because it only serves as a guess.
  static std::atomic<int64_t>& last_found(int device, int64_t numel) {
    static std::array<std::atomic<int64_t>, 256> found;
    return found[(std::hash<int64_t>()(numel) * 31 + static_cast<size_t>(device)) % found.size()];
  }

  // The number of changes in every kStride-th block, which the GPU writes to the host's memory.
  class Sample {
   public:
    Sample(DeltaCall& call, cudaStream_t stream)
        : stream_(stream), counts_(host_memory(call.blocks() / kStride + call.args.count + 1, ScalarType::Int)) {
      int* count = counts_.mutable_data_ptr<int>();
      std::fill(count, count + counts_.numel(), kNotWritten);
      call.args.sample_stride = kStride;
      call.args.sampled = count;
      size_ = cuda::delta_sample(call.args, stream);
    }

    Sample(const Sample&) = delete;
    // The memory may be reused after this, so the GPU must be done with it, also after an error.
    ~Sample() {
      if (!complete_) cudaStreamSynchronize(stream_);
    }

    int64_t estimate() const { return kStride * found(); }

    // The estimate plus six per cent and eight standard deviations, as if the changes were independent.
    int64_t upper_estimate() const {
      const auto found = static_cast<double>(this->found());
      return static_cast<int64_t>(kStride * (1.0625 * found + 8.0 * std::sqrt(found) + 1024.0));
    }

   private:
    static constexpr int64_t kStride = 512;
    cudaStream_t stream_;
    Tensor counts_;
    int64_t size_;
    mutable bool complete_ = false;

    int64_t found() const {
      int64_t found = 0;
      for (int64_t i = 0; i < size_; ++i) found += poll(counts_.const_data_ptr<int>() + i, stream_);
      complete_ = true;
      return found;
    }
  };
};

// masked_grad_gather_ for a list of `of` tensors that several calls gather: this one gathers those with the given
// `numbers`. Tensor i's partial sums are written to `partial_sums`, of the whole list, from first_partials[i] on.
void gather_partly_(const TensorView& out, TensorList dense, const TensorView& indices, Ints starts, Ints ends,
                    Ints numbers, int64_t of, bool accumulate, const TensorView& partial_sums, Ints first_partials,
                    const OptionalTensor& found_inf, int64_t run_length, const OptionalTensor& index_bases) {
  const GatherCall call(out, dense, indices, starts, ends, std::nullopt, accumulate, std::nullopt, found_inf,
                        run_length, index_bases, of);
  check_partly(starts, ends, numbers, of, partial_sums, first_partials);
  Cuda::gather_partly(call.args, partial_sums.as<float>(), first_partials.data(), numbers.data(), indices.device.index);
}

// tile_weight_grad_ for some weights of a list, as gather_partly_: the partial sums of weight i are written to those of
// the whole list from first_partials[i] on.
void tile_weight_grad_partly_(const TensorView& out, TensorList grad_outputs, TensorList inputs,
                              const TensorView& tiles, Ints starts, Ints ends, int64_t tile_size, bool accumulate,
                              const TensorView& partial_sums, Ints first_partials, const OptionalTensor& found_inf,
                              const OptionalTensor& token_offsets) {
  TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, accumulate, found_inf);
  call.set_token_offsets(token_offsets, tiles.device);
  call.check_partly(partial_sums, first_partials);
  Cuda::tiles_partly(call.args, partial_sums.as<float>(), first_partials.data(), tiles.device.index);
}

// For bench/kernels/sanitize_ops.py, which makes sure that its calls use clusters.
int64_t tile_weight_grad_parts(const TensorView& out, TensorList grad_outputs, TensorList inputs,
                               const TensorView& tiles, Ints starts, Ints ends, int64_t tile_size) {
  const TileCall call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, false, std::nullopt);
  const OnStream stream(tiles.device.index);
  return cuda::tile_weight_grad_parts(call.args);
}

void add_partial_sums_(const TensorView& sum_sq, const TensorView& partial_sums, Ints starts, Ints ends,
                       const OptionalTensor& clip, const OptionalTensor& finished, double max_norm) {
  const SumCall call(sum_sq, partial_sums, starts, ends, clip, finished, max_norm);
  Cuda::sum_partials(call.segments, partial_sums.as<const float>(), call.sums, call.clip, partial_sums.device.index);
}

bool is_capturing(int device) {
  cudaStreamCaptureStatus status{};
  check_cuda(cudaStreamIsCapturing(OnStream(device), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void add_cuda(KernelTable& table) {
  table.cuda = table_of<Cuda>();
  table.gather_partly = &Cuda::gather_partly;
  table.tiles_partly = &Cuda::tiles_partly;
  table.sum_partials = &Cuda::sum_partials;
  table.is_capturing = &is_capturing;
}

}  // namespace sparse_opt

STABLE_TORCH_LIBRARY_IMPL(SPARSE_OPT_NATIVE, CUDA, m) {
  sparse_opt::implement_ops<sparse_opt::Cuda>(m);
  m.impl("gather_partly_", sparse_opt::boxed<&sparse_opt::gather_partly_>);
  m.impl("tile_weight_grad_partly_", sparse_opt::boxed<&sparse_opt::tile_weight_grad_partly_>);
  m.impl("tile_weight_grad_parts", sparse_opt::boxed<&sparse_opt::tile_weight_grad_parts>);
  m.impl("add_partial_sums_", sparse_opt::boxed<&sparse_opt::add_partial_sums_>);
}
