// The part of BoundParams that gradients come to: gathered one by one or together, and products of tiles.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <limits>

#ifdef SPARSE_OPT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "bound_params.h"
#include "gather_stream.h"
#include "native_op.h"

namespace sparse_opt {
namespace {

using Gather = decltype(masked_grad_gather_<AnyDevice>);
using GatherPartly = void(const at::Tensor&, at::TensorList, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                          at::IntArrayRef, int64_t, bool, const at::Tensor&, at::IntArrayRef, const OptionalTensor&,
                          int64_t, const OptionalTensor&);
using TileWeightGrad = decltype(tile_weight_grad_<AnyDevice>);
using TileWeightGradPartly = void(const at::Tensor&, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
                                  at::IntArrayRef, int64_t, bool, const at::Tensor&, at::IntArrayRef,
                                  const OptionalTensor&);
using AddPartialSums = void(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef);

// About four tiles of 64 or one of 128 for each multiprocessor of an H200.
int64_t enough_tiles(int64_t tile_size) {
  return tile_size == 64 ? 528 : 132;
}
constexpr int64_t kMostBytes = int64_t{512} << 20;

// Gradients wait to be gathered together, on a GPU: no more than would hold so much memory, or this part of what all of
// an object's would. Longer ones are worth a launch of their own. Those of all objects count together where memory
// does: parameter groups that a backward pass goes through one after the other leave their last ones waiting.
constexpr int64_t kMostGradientBytes = int64_t{128} << 20, kGradientParts = 16;
std::atomic<int64_t> all_waiting_bytes{0};

// The gather of a matrix is over before it has filled a GPU, and so is what comes before and after it: beside the next
// product of the backward pass it costs less. What is shorter costs the host more than the GPU.
constexpr int64_t kLeastBytesBeside = int64_t{1} << 20;

// Whether work on the stream is recorded in a graph, which may not wait for work outside of it, nor be waited for.
bool is_captured([[maybe_unused]] c10::Stream stream) {
#ifdef SPARSE_OPT_WITH_CUDA
  if (stream.device_type() == at::kCUDA) {
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace

c10::Stream BoundParams::current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

int64_t BoundParams::enough_grad_bytes() const {
  if (!indices_.is_cuda()) return 0;
  int64_t bytes = 0;
  for (const at::Tensor& param : params_) bytes += static_cast<int64_t>(param.nbytes());
  return std::min(kMostGradientBytes, bytes / kGradientParts);
}

void BoundParams::lay_out_partial_sums() {
  if (!indices_.is_cuda()) return;
  first_partial_.clear();
  partials_end_.clear();
  int64_t partials = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t tiles = tiles_.defined() ? tile_ends_[i] - tile_starts_[i] : 0;
    const int64_t room = std::max(gather_blocks(starts_[i], ends_[i]), tiles);
    first_partial_.push_back(partials);
    partials_end_.push_back(room * kGatherBlock);
    partials += room;
  }
  partials_begin_.assign(params_.size(), 0);
  partial_sums_ = at::zeros({partials}, indices_.options().dtype(at::kFloat));
  std::fill(last_pass_.begin(), last_pass_.end(), Pass::kNone);
}

// To be called before a pass leaves its partial sums: those of another kind's would stand behind them.
void BoundParams::begin_pass(size_t i, Pass pass) {
  if (!partial_sums_.defined()) return;
  if (last_pass_[i] != Pass::kNone && last_pass_[i] != pass)
    partial_sums_.narrow(0, first_partial_[i], partials_end_[i] / kGatherBlock).zero_();
  last_pass_[i] = pass;
}

// Passes over the buffers come in the order of the calls, also where those come on different streams: they may have
// slots and partial sums in common. All that has been given to the other stream until now is waited for.
void BoundParams::wait_for_last_stream() {
  const c10::Stream current = current_stream(indices_.device());
  if (current == last_stream_ || is_captured(current) || is_captured(last_stream_)) return;
  c10::Event done(current.device_type());
  done.record(last_stream_);
  done.block(current);
  last_stream_ = current;
}

void BoundParams::gather_(int64_t i, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& sum_sq,
                          const OptionalTensor& found_inf) {
  const std::lock_guard lock(mutex_);
  check_gradient(i, grad);
  if (waits(i)) flush_locked();
  gather_list_({{static_cast<size_t>(i), grad}}, out, received_[i], sum_sq, found_inf);
  received_[i] = true;
}

void BoundParams::check_gradient(int64_t i, const at::Tensor& grad) const {
  SPARSE_OPT_CHECK(grad.numel() == numels_.at(i), "the gradient of params[", i, "] has ", grad.numel(),
                   " elements, wanted ", numels_[i]);
}

void BoundParams::gather_list_(const std::vector<Gradient>& list, const at::Tensor& out, bool accumulate,
                               const at::Tensor& sum_sq, const OptionalTensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  wait_for_last_stream();
  if (!partial_sums_.defined()) {
    static const auto op = native_op<Gather>("sparse_opt_native::masked_grad_gather_");
    for (const auto& [i, grad] : list) {
      op.call(out, grad.contiguous(), indices_, at::IntArrayRef(starts_[i]), at::IntArrayRef(ends_[i]), std::nullopt,
              accumulate, sum_sq.narrow(0, static_cast<int64_t>(i), 1), found_inf, run_length_, own_bases_[i]);
    }
    return;
  }
  std::vector<at::Tensor> grads;
  std::vector<int64_t> starts, ends, numbers, first_partials;
  for (const auto& [i, grad] : list) {
    grads.push_back(grad.contiguous());
    starts.push_back(starts_[i]);
    ends.push_back(ends_[i]);
    numbers.push_back(static_cast<int64_t>(i));
    first_partials.push_back(first_partial_[i]);
    begin_pass(i, Pass::kGather);
  }
  static const auto op = native_op<GatherPartly>("sparse_opt_native::gather_partly_");
  op.call(out, grads, indices_, starts, ends, numbers, static_cast<int64_t>(params_.size()), accumulate, partial_sums_,
          first_partials, found_inf, run_length_, index_bases_);
}

void BoundParams::receive_into(const at::Tensor& out, const at::Tensor& sum_sq) {
  const std::lock_guard lock(mutex_);
  finish_gathers();
  out_ = out;
  sum_sq_ = sum_sq;
}

void BoundParams::set_receiving(bool receiving) {
  const std::lock_guard lock(mutex_);
  receiving_ = receiving;
}

bool BoundParams::receive(size_t i) {
  at::Tensor taken;  // outlives the lock: a gradient may have a graph, of which any code may be part
  const std::lock_guard lock(mutex_);
  at::Tensor& grad = params_[i].mutable_grad();
  if (!receiving_) return false;
  if (!grad.defined() && came_by_tiles_.at(i) != 0) return true;
  if (!grad.defined() || grad.layout() != at::kStrided) return false;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  taken = std::exchange(grad, at::Tensor());
  check_gradient(static_cast<int64_t>(i), taken);
  if (waits(i)) flush_locked();
  const auto bytes = static_cast<int64_t>(taken.storage().nbytes());
  // Those who have its memory too might write it meanwhile.
  const bool may_wait = most_grad_bytes_ > 0 && bytes <= kMostGradientBytes && taken.storage().use_count() == 1;
  if (!may_wait) {
    gather_list_({{i, taken}}, out_, received_[i], sum_sq_, std::nullopt);
    received_[i] = true;
    return true;
  }
  const c10::Stream stream = current_stream(indices_.device());
  const bool fits = waiting_grads_.bytes + bytes <= most_grad_bytes_;
  if (!fits || !waiting_grads_.takes(received_[i], taken.scalar_type(), stream)) flush_grads();
  waiting_grads_.add({i, taken.requires_grad() ? taken.detach() : taken}, received_[i], taken.scalar_type(), stream);
  waiting_grads_.bytes += bytes;
  all_waiting_bytes += bytes;
  received_[i] = true;
  if (waiting_grads_.bytes >= most_grad_bytes_ || all_waiting_bytes >= kMostGradientBytes) {
    flush_grads();
  } else {
    flush_at_the_end();
  }
  return true;
}

// The current stream waits for them, and the one that a gradient is held for.
void BoundParams::finish_gathers() {
  if (!indices_.is_cuda()) return;
  GatherStream::release(indices_.device());
  wait_for_last_stream();
}

void BoundParams::sum_squares_(const at::Tensor& sum_sq) {
  flush();
  if (!partial_sums_.defined()) return;
  static const auto op = native_op<AddPartialSums>("sparse_opt_native::add_partial_sums_");
  op.call(sum_sq, partial_sums_, partials_begin_, partials_end_);
}

void BoundParams::set_tiles(at::Tensor tiles, std::vector<int64_t> starts, std::vector<int64_t> ends,
                            int64_t tile_size) {
  SPARSE_OPT_CHECK(starts.size() == params_.size() && ends.size() == params_.size(), "there are ", starts.size(),
                   " starts and ", ends.size(), " ends of tiles, wanted ", params_.size(), " of each");
  for (size_t i = 0; i < params_.size(); ++i) {
    SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= tiles.size(0), "params[", i,
                     "] has the tiles [", starts[i], ", ", ends[i], "), wanted within [0, ", tiles.size(0), ")");
    SPARSE_OPT_CHECK(starts[i] == ends[i] || params_[i].dim() == 2, "params[", i, "] has ", params_[i].dim(),
                     " dimensions and tiles, wanted a matrix");
    matrices_.emplace_back(starts[i] < ends[i] ? params_[i].size(0) : 0, starts[i] < ends[i] ? params_[i].size(1) : 0);
  }
  tiles_ = std::move(tiles);
  tile_starts_ = std::move(starts);
  tile_ends_ = std::move(ends);
  tile_size_ = tile_size;
  set_waiting(enough_tiles(tile_size), kMostBytes);
  lay_out_partial_sums();
}

void BoundParams::set_waiting(int64_t tiles, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  most_tiles_ = tiles;
  most_bytes_ = bytes;
}

void BoundParams::set_waiting_grads(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  most_grad_bytes_ = bytes;
}

void BoundParams::check_tile_operands(int64_t i, const at::Tensor& left, const at::Tensor& right) const {
  SPARSE_OPT_CHECK(tiles_.defined() && tile_starts_.at(i) < tile_ends_[i], "params[", i, "] has no tiles");
  const auto& [rows, columns] = matrices_[i];
  SPARSE_OPT_CHECK(left.size(-1) == rows && right.size(-1) == columns, "params[", i, "] has sizes [", left.size(-1),
                   ", ", right.size(-1), "], but had [", rows, ", ", columns, "] when its mask was bound");
}

void BoundParams::tile_grad_(int64_t i, const at::Tensor& left, const at::Tensor& right, const at::Tensor& out,
                             const at::Tensor& sum_sq, const OptionalTensor& found_inf) {
  check_tile_operands(i, left, right);
  const std::lock_guard lock(mutex_);
  flush_locked();
  tile_grads_({{static_cast<size_t>(i), left, right, version_of(left), version_of(right)}}, out, received_[i], sum_sq,
              found_inf);
  received_[i] = true;
  came_by_tiles_[i] = 1;
}

void BoundParams::add_values_(int64_t i, const at::Tensor& values, const at::Tensor& out, const at::Tensor& sum_sq,
                              const OptionalTensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const std::lock_guard lock(mutex_);
  if (waits(i)) flush_locked();
  wait_for_last_stream();
  const at::Tensor slots = out.narrow(0, starts_.at(i), ends_[i] - starts_[i]);
  slots.copy_(received_[i] ? slots.to(at::kFloat).add_(values) : values);
  const at::Tensor stored = slots.to(at::kFloat);
  begin_pass(i, Pass::kAdded);
  (partial_sums_.defined() ? partial_sums_.narrow(0, first_partial_[i], 1) : sum_sq.narrow(0, i, 1))
      .copy_(stored.square().sum());
  if (found_inf.has_value()) {
    found_inf->masked_fill_(stored.isfinite().all().logical_not_(), std::numeric_limits<double>::infinity());
  }
  received_[i] = true;
  came_by_tiles_[i] = 1;
}

void BoundParams::tile_grads_(const std::vector<TileOperands>& list, const at::Tensor& out, bool accumulate,
                              const at::Tensor& sum_sq, const OptionalTensor& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  wait_for_last_stream();
  std::vector<at::Tensor> lefts, rights;
  std::vector<int64_t> starts, ends, first_partials;
  for (const TileOperands& p : list) {
    SPARSE_OPT_CHECK(version_of(p.left) == p.left_version && version_of(p.right) == p.right_version,
                     "the input or the output gradient of the linear layer with params[", p.i,
                     "] was changed in place before its weight gradient was made; build the optimizer with "
                     "tile_backward=False");
    lefts.push_back(p.left.contiguous());
    rights.push_back(p.right.contiguous());
    starts.push_back(tile_starts_[p.i]);
    ends.push_back(tile_ends_[p.i]);
    begin_pass(p.i, Pass::kTiles);
    if (partial_sums_.defined()) first_partials.push_back(first_partial_[p.i]);
  }
  if (partial_sums_.defined()) {
    static const auto op = native_op<TileWeightGradPartly>("sparse_opt_native::tile_weight_grad_partly_");
    op.call(out, lefts, rights, tiles_, starts, ends, tile_size_, accumulate, partial_sums_, first_partials, found_inf);
    return;
  }
  static const auto op = native_op<TileWeightGrad>("sparse_opt_native::tile_weight_grad_");
  // Sums of squares go where they belong only if the list is one stretch of the parameters'.
  const at::Tensor sums = list.size() == 1 ? sum_sq.narrow(0, static_cast<int64_t>(list[0].i), 1)
                                           : at::empty({static_cast<int64_t>(list.size())}, sum_sq.options());
  op.call(out, lefts, rights, tiles_, starts, ends, tile_size_, std::nullopt, accumulate, sums, found_inf);
  if (list.size() == 1) return;
  for (size_t k = 0; k < list.size(); ++k)
    sum_sq.mutable_data_ptr<float>()[list[k].i] = sums.const_data_ptr<float>()[k];
}

bool BoundParams::waits(size_t i) const {
  const auto in = [i](const auto& list) {
    return std::any_of(list.begin(), list.end(), [i](const auto& gradient) { return gradient.i == i; });
  };
  return in(waiting_tiles_.list) || in(waiting_grads_.list);
}

bool BoundParams::receive_tiles(size_t i, const at::Tensor& left, const at::Tensor& right) {
  std::unique_lock lock(mutex_);
  if (!receiving_) {
    lock.unlock();  // it takes the interpreter's lock, and calls back
    return take_tiles_ && take_tiles_(i, left, right);
  }
  check_tile_operands(static_cast<int64_t>(i), left, right);
  if (waits(i)) flush_locked();
  const c10::Stream stream = current_stream(tiles_.device());
  if (!waiting_tiles_.takes(received_[i], left.scalar_type(), stream)) flush_tiles();
  const auto held = [&](const at::Tensor& tensor) {
    const auto same = [&](const at::Tensor& other) { return other.is_alias_of(tensor); };
    const bool counted = std::any_of(waiting_tiles_.list.begin(), waiting_tiles_.list.end(),
                                     [&](const TileOperands& p) { return same(p.left) || same(p.right); });
    return counted ? 0 : static_cast<int64_t>(tensor.storage().nbytes());
  };
  const int64_t bytes = held(left) + held(right);
  waiting_tiles_.add({i, left, right, version_of(left), version_of(right)}, received_[i], left.scalar_type(), stream);
  waiting_tiles_.tiles += tile_ends_[i] - tile_starts_[i];
  waiting_tiles_.bytes += bytes;
  received_[i] = true;
  came_by_tiles_[i] = 1;
  if (waiting_tiles_.tiles >= most_tiles_ || waiting_tiles_.bytes > most_bytes_) {
    flush_tiles();
  } else {
    flush_at_the_end();
  }
  return true;
}

// Of this backward pass. One that raised never ended, so the next one must ask again.
void BoundParams::flush_at_the_end() {
  const int graph = torch::autograd::get_current_graph_task_id();
  if (graph == -1 || graph == ending_graph_) return;
  ending_graph_ = graph;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const std::shared_ptr<BoundParams> bound = weak.lock()) bound->flush();
  });
}

void BoundParams::flush() {
  const std::lock_guard lock(mutex_);
  flush_locked();
  finish_gathers();
}

void BoundParams::flush_locked() {
  flush_tiles();
  flush_grads();
}

template <typename T, typename Put>
void BoundParams::put(const Waiting<T>& now, Put put) {
  const c10::StreamGuard guard(now.stream);
  try {
    put();
  } catch (...) {  // what stands in the slots is of an earlier step
    for (const T& gradient : now.list) received_[gradient.i] = now.accumulate;
    throw;
  }
}

void BoundParams::flush_tiles() {
  if (waiting_tiles_.list.empty()) return;
  const Waiting<TileOperands> now = waiting_tiles_.take();
  put(now, [&] { tile_grads_(now.list, out_, now.accumulate, sum_sq_, std::nullopt); });
}

void BoundParams::flush_grads() {
  if (waiting_grads_.list.empty()) return;
  const Waiting<Gradient> now = take_waiting_grads();
  put(now, [&] {
    const auto gather = [&] { gather_list_(now.list, out_, now.accumulate, sum_sq_, std::nullopt); };
    if (!indices_.is_cuda() || now.bytes < kLeastBytesBeside || is_captured(now.stream)) return gather();
    std::vector<at::Tensor> held;
    for (const Gradient& gradient : now.list) held.push_back(gradient.grad);
    GatherStream::run(std::move(held), now.stream, gather);
    flush_at_the_end();
  });
}

BoundParams::Waiting<BoundParams::Gradient> BoundParams::take_waiting_grads() {
  all_waiting_bytes -= waiting_grads_.bytes;
  return waiting_grads_.take();
}

void BoundParams::drop() {
  std::vector<TileOperands> operands;  // outlive the lock, as in receive
  std::vector<Gradient> grads;
  std::vector<at::Tensor> held;
  const std::lock_guard lock(mutex_);
  finish_gathers();
  operands = waiting_tiles_.take().list;
  grads = take_waiting_grads().list;
  held.swap(grads_);
  std::fill(came_by_tiles_.begin(), came_by_tiles_.end(), char{0});
  received_.assign(params_.size(), false);
}

bool BoundParams::came_by_tiles(size_t i) const {
  const std::lock_guard lock(mutex_);
  return came_by_tiles_.at(i) != 0;
}

std::vector<bool> BoundParams::received() const {
  const std::lock_guard lock(mutex_);
  return received_;
}

void BoundParams::set_received(std::vector<bool> received) {
  SPARSE_OPT_CHECK(received.size() == params_.size(), "received has ", received.size(), " elements, expected ",
                   params_.size());
  const std::lock_guard lock(mutex_);
  received_ = std::move(received);
}

}  // namespace sparse_opt
