#include "gradient_buffer.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>

#include "direct_ops.h"
#include "error_text.h"
#include "gather_stream.h"

namespace sparse_opt {
namespace {

// Tiles that are multiplied at once: about four tiles of 64, or one of 128, for each multiprocessor of an H200.
int64_t max_queued_tiles(int64_t tile_size) {
  return tile_size == 64 ? 528 : 132;
}
constexpr int64_t kMaxTileBytes = int64_t{512} << 20;

// On a GPU the gradients of one buffer are queued up to this memory, or up to this part of the memory of all of its
// gradients; longer lists are worth a launch. The queues of all buffers together have the same limit in bytes:
// otherwise parameter groups whose gradients come one after the other would all leave their last ones queued.
constexpr int64_t kMaxGradientBytes = int64_t{128} << 20, kGradientParts = 16;
std::atomic<int64_t> total_queued_bytes{0};

// The gather of a matrix is too short to fill a GPU, so it costs less next to the matrix products of the backward pass.
// Below this size the second stream costs the host more time than it saves on the GPU.
constexpr int64_t kMinSideStreamBytes = int64_t{1} << 20;

int64_t max_queued_gradient_bytes(const BoundParams& bound) {
  if (!bound.indices().is_cuda()) return 0;
  int64_t bytes = 0;
  for (const at::Tensor& param : bound.params()) bytes += static_cast<int64_t>(param.nbytes());
  return std::min(kMaxGradientBytes, bytes / kGradientParts);
}

// Whether the stream is being captured in a CUDA graph: then it must not wait for work outside of the graph, and work
// outside must not wait for it.
bool is_captured(c10::Stream stream) {
  return stream.device_type() == at::kCUDA && direct::table().is_capturing(stream.native_handle());
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace

// Holds the mutex, and afterwards frees the operands of products: they may have a graph, whose nodes may run any code.
class GradientBuffer::Lock {
 public:
  explicit Lock(GradientBuffer& buffer) : buffer_(buffer), lock_(buffer.mutex_) {}
  ~Lock() { used_ = std::exchange(buffer_.used_operands_, {}); }

 private:
  GradientBuffer& buffer_;
  std::vector<TileOperands> used_;
  const std::lock_guard<std::mutex> lock_;  // released before used_
};

GradientBuffer::GradientBuffer(std::shared_ptr<const BoundParams> bound, at::Tensor values, at::Tensor sum_sq,
                               std::optional<Tiles> tiles)
    : bound_(std::move(bound)),
      values_(std::move(values)),
      sum_sq_(std::move(sum_sq)),
      tiles_(std::move(tiles)),
      own_bases_(bound_->params().size()),
      last_pass_(bound_->params().size(), Pass::kNone),
      received_(bound_->params().size()),
      received_tiles_(bound_->params().size()),
      tile_queue_{current_stream(values_.device())},
      gradient_queue_{current_stream(values_.device())},
      max_gradient_bytes_(max_queued_gradient_bytes(*bound_)),
      last_stream_(current_stream(values_.device())) {
  if (bound_->index_bases().has_value()) {
    const int64_t frames = bound_->indices().numel() / kIndexFrame + 1;
    for (size_t i = 0; i < own_bases_.size(); ++i)
      own_bases_[i] = bound_->index_bases()->narrow(0, static_cast<int64_t>(i), frames);
  }
  if (tiles_.has_value()) {
    check_tiles();
    max_tiles_ = max_queued_tiles(tiles_->tile_size);
    max_tile_bytes_ = kMaxTileBytes;
  }
  allocate_partial_sums();
}

// A backward pass that raised may have left a gather running, and its buffers belong to other streams.
GradientBuffer::~GradientBuffer() {
  take_queued_gradients();
  try {
    wait_for_gathers();
  } catch (const std::exception&) {  // of an earlier kernel; the next synchronization reports it
  }
}

void GradientBuffer::check_tiles() {
  const std::vector<at::Tensor>& params = bound_->params();
  const auto& [table, starts, ends, tile_size] = *tiles_;
  SPARSE_OPT_CHECK(starts.size() == params.size() && ends.size() == params.size(), "tiles have ", starts.size(),
                   " starts and ", ends.size(), " ends, expected ", params.size(), " of each");
  for (size_t i = 0; i < params.size(); ++i) {
    SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= table.size(0), "params[", i,
                     "] has the tiles [", starts[i], ", ", ends[i], "), expected a part of [0, ", table.size(0), ")");
    SPARSE_OPT_CHECK(starts[i] == ends[i] || params[i].dim() == 2, "params[", i, "] has ", params[i].dim(),
                     " dimensions and tiles, expected a matrix");
    matrices_.emplace_back(starts[i] < ends[i] ? params[i].size(0) : 0, starts[i] < ends[i] ? params[i].size(1) : 0);
  }
}

c10::Stream GradientBuffer::current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void GradientBuffer::allocate_partial_sums() {
  if (!values_.is_cuda()) return;
  int64_t partials = 0;
  for (size_t i = 0; i < last_pass_.size(); ++i) {
    const int64_t tiles = tiles_.has_value() ? tiles_->ends[i] - tiles_->starts[i] : 0;
    const int64_t capacity = std::max(gather_blocks(bound_->start(i), bound_->end(i)), tiles);
    first_partial_.push_back(partials);
    partials_end_.push_back(capacity * kGatherBlock);
    partials += capacity;
  }
  partials_begin_.assign(last_pass_.size(), 0);
  partial_sums_ = at::zeros({partials}, values_.options().dtype(at::kFloat));
  finished_ = at::zeros({1}, values_.options().dtype(at::kInt));
}

// Call it before a pass writes the partial sums of the list's parameters: a pass of another kind may have written more
// of them. Once a pass has been captured in a CUDA graph, every pass clears them: last_pass_ does not show what
// replays, and captures that failed, have written.
template <typename T>
void GradientBuffer::begin_pass(const std::vector<T>& list, Pass pass) {
  if (!partial_sums_.defined()) return;
  captured_ = captured_ || is_captured(current_stream(values_.device()));
  std::vector<at::Tensor> stale;
  for (const T& gradient : list) {
    const size_t i = gradient.i;
    if (captured_ || (last_pass_[i] != Pass::kNone && last_pass_[i] != pass))
      stale.push_back(partial_sums_.narrow(0, first_partial_[i], partials_end_[i] / kGatherBlock));
    last_pass_[i] = pass;
  }
  if (!stale.empty()) at::_foreach_zero_(stale);  // one launch
}

// Passes may share slots and partial sums, so they run in the order of the calls, also on different streams: the
// current stream waits for all work that the previous one has now.
void GradientBuffer::wait_for_last_stream() {
  const c10::Stream current = current_stream(values_.device());
  if (current == last_stream_ || is_captured(current) || is_captured(last_stream_)) return;
  c10::Event done(current.device_type());
  done.record(last_stream_);
  done.block(current);
  last_stream_ = current;
}

// The current stream waits for the gathers, and so does the stream that their gradients belong to.
void GradientBuffer::wait_for_gathers() {
  if (!values_.is_cuda()) return;
  GatherStream::release(values_.device());
  wait_for_last_stream();
}

// Adding gradients at once

void GradientBuffer::add_dense_(int64_t i, const at::Tensor& grad, const std::optional<at::Tensor>& found_inf) {
  const Lock lock(*this);
  check_gradient(i, grad);
  if (is_queued(i)) flush();
  gather_({{static_cast<size_t>(i), grad}}, received_[i], found_inf);
  received_[i] = true;
}

void GradientBuffer::add_tiles_(const std::vector<int64_t>& which, const std::vector<at::Tensor>& lefts,
                                const std::vector<at::Tensor>& rights, const std::optional<at::Tensor>& found_inf) {
  SPARSE_OPT_CHECK(lefts.size() == which.size() && rights.size() == which.size(), "there are ", which.size(),
                   " parameters, ", lefts.size(), " left and ", rights.size(), " right operands");
  for (size_t k = 0; k < which.size(); ++k) check_tile_operands(which[k], lefts[k], rights[k]);
  const Lock lock(*this);
  flush();
  std::vector<TileOperands> list;
  bool accumulate = false;
  const auto add = [&] {
    if (list.empty()) return;
    multiply_tiles_(list, accumulate, found_inf);
    for (const TileOperands& p : list) received_[p.i] = received_tiles_[p.i] = true;
    list.clear();
  };
  for (size_t k = 0; k < which.size(); ++k) {
    const auto i = static_cast<size_t>(which[k]);
    const auto excludes = [&](const TileOperands& p) {
      return p.i == i || p.left.scalar_type() != lefts[k].scalar_type();
    };
    if (received_[i] != accumulate || std::any_of(list.begin(), list.end(), excludes)) add();
    accumulate = received_[i];
    list.push_back({i, lefts[k], rights[k], version_of(lefts[k]), version_of(rights[k])});
  }
  add();
}

void GradientBuffer::add_values_(int64_t i, const at::Tensor& values, const std::optional<at::Tensor>& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Lock lock(*this);
  if (is_queued(i)) flush();
  wait_for_last_stream();
  const at::Tensor slots = values_.narrow(0, bound_->start(i), bound_->end(i) - bound_->start(i));
  if (received_[i]) {
    slots.add_(values);  // the sum is rounded once
  } else {
    slots.copy_(values);
  }
  const at::Tensor stored = slots.to(at::kFloat);
  begin_pass<Gradient>({{static_cast<size_t>(i), {}}}, Pass::kValues);
  (partial_sums_.defined() ? partial_sums_.narrow(0, first_partial_[i], 1) : sum_sq_.narrow(0, i, 1))
      .copy_(stored.square().sum());
  if (found_inf.has_value()) {
    found_inf->masked_fill_(stored.isfinite().all().logical_not_(), std::numeric_limits<double>::infinity());
  }
  received_[i] = received_tiles_[i] = true;
}

void GradientBuffer::check_gradient(int64_t i, const at::Tensor& grad) const {
  SPARSE_OPT_CHECK(grad.numel() == bound_->numel(i), "the gradient of params[", i, "] has ", grad.numel(),
                   " elements, expected ", bound_->numel(i));
}

void GradientBuffer::gather_(const std::vector<Gradient>& list, bool accumulate,
                             const std::optional<at::Tensor>& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  wait_for_last_stream();
  if (!partial_sums_.defined()) {
    for (const auto& [i, grad] : list) {
      const int64_t start = bound_->start(i), end = bound_->end(i);
      direct::masked_grad_gather_(values_, grad.contiguous(), bound_->indices(), start, end, std::nullopt, accumulate,
                                  sum_sq_.narrow(0, static_cast<int64_t>(i), 1), found_inf, bound_->run_length(),
                                  own_bases_[i]);
    }
    return;
  }
  std::vector<at::Tensor> grads;
  std::vector<int64_t> starts, ends, numbers, first_partials;
  for (const auto& [i, grad] : list) {
    grads.push_back(grad.contiguous());
    starts.push_back(bound_->start(i));
    ends.push_back(bound_->end(i));
    numbers.push_back(static_cast<int64_t>(i));
    first_partials.push_back(first_partial_[i]);
  }
  begin_pass(list, Pass::kGather);
  direct::gather_partly_(values_, grads, bound_->indices(), starts, ends, numbers,
                         static_cast<int64_t>(last_pass_.size()), accumulate, partial_sums_, first_partials, found_inf,
                         bound_->run_length(), bound_->index_bases());
}

void GradientBuffer::check_tile_operands(int64_t i, const at::Tensor& left, const at::Tensor& right) const {
  SPARSE_OPT_CHECK(tiles_.has_value() && tiles_->starts.at(i) < tiles_->ends[i], "params[", i, "] has no tiles");
  const auto& [rows, columns] = matrices_[i];
  SPARSE_OPT_CHECK(left.size(-1) == rows && right.size(-1) == columns, "params[", i, "] has sizes [", left.size(-1),
                   ", ", right.size(-1), "], but had [", rows, ", ", columns, "] when its mask was bound");
}

void GradientBuffer::multiply_tiles_(const std::vector<TileOperands>& list, bool accumulate,
                                     const std::optional<at::Tensor>& found_inf) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  wait_for_last_stream();
  std::vector<at::Tensor> lefts, rights;
  std::vector<int64_t> starts, ends, first_partials;
  for (const TileOperands& p : list) {
    SPARSE_OPT_CHECK(version_of(p.left) == p.left_version && version_of(p.right) == p.right_version,
                     "the input or the output gradient of the linear layer with params[", p.i,
                     "] was changed in place before its weight gradient was computed; build the optimizer with "
                     "tile_backward=False");
    lefts.push_back(p.left.contiguous());
    rights.push_back(p.right.contiguous());
    starts.push_back(tiles_->starts[p.i]);
    ends.push_back(tiles_->ends[p.i]);
    if (partial_sums_.defined()) first_partials.push_back(first_partial_[p.i]);
  }
  begin_pass(list, Pass::kTiles);
  if (partial_sums_.defined()) {
    direct::tile_weight_grad_partly_(values_, lefts, rights, tiles_->table, starts, ends, tiles_->tile_size, accumulate,
                                     partial_sums_, first_partials, found_inf);
    return;
  }
  // The op writes one sum per list element, and the elements may be any of the parameters.
  const at::Tensor sums = list.size() == 1 ? sum_sq_.narrow(0, static_cast<int64_t>(list[0].i), 1)
                                           : at::empty({static_cast<int64_t>(list.size())}, sum_sq_.options());
  direct::tile_weight_grad_(values_, lefts, rights, tiles_->table, starts, ends, tiles_->tile_size, accumulate, sums,
                            found_inf);
  if (list.size() == 1) return;
  for (size_t k = 0; k < list.size(); ++k)
    sum_sq_.mutable_data_ptr<float>()[list[k].i] = sums.const_data_ptr<float>()[k];
}

// Gradients from autograd, which are queued

void GradientBuffer::set_direct(bool direct, const std::optional<at::Tensor>& found_inf) {
  const std::lock_guard lock(mutex_);
  direct_ = direct;
  if (direct) found_inf_ = found_inf;
}

bool GradientBuffer::receive(size_t i) {
  at::Tensor taken;  // freed after the lock is released: a gradient may have a graph, whose nodes may run any code
  const Lock lock(*this);
  at::Tensor& grad = bound_->params()[i].mutable_grad();
  if (!direct_) return false;
  if (!grad.defined() && received_tiles_.at(i)) return true;
  if (!grad.defined() || grad.layout() != at::kStrided) return false;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  taken = std::exchange(grad, at::Tensor());
  check_gradient(static_cast<int64_t>(i), taken);
  if (is_queued(i)) flush();
  const auto bytes = static_cast<int64_t>(taken.storage().nbytes());
  // Another owner of the memory could write to it while the gradient is queued.
  const bool can_queue = max_gradient_bytes_ > 0 && bytes <= kMaxGradientBytes && taken.storage().use_count() == 1;
  if (!can_queue) {
    gather_({{i, taken}}, received_[i], found_inf_);
    received_[i] = true;
    return true;
  }
  const c10::Stream stream = current_stream(values_.device());
  const bool fits = gradient_queue_.bytes + bytes <= max_gradient_bytes_;
  if (!fits || !gradient_queue_.accepts(received_[i], taken.scalar_type(), stream)) flush_gradients();
  gradient_queue_.add({i, taken.requires_grad() ? taken.detach() : taken}, received_[i], taken.scalar_type(), stream);
  gradient_queue_.bytes += bytes;
  total_queued_bytes += bytes;
  received_[i] = true;
  if (gradient_queue_.bytes >= max_gradient_bytes_ || total_queued_bytes >= kMaxGradientBytes) {
    flush_gradients();
  } else {
    finish_after_backward();
  }
  return true;
}

bool GradientBuffer::receive_tiles(size_t i, const at::Tensor& left, const at::Tensor& right) {
  const Lock lock(*this);
  if (!direct_) return false;
  check_tile_operands(static_cast<int64_t>(i), left, right);
  if (is_queued(i)) flush();
  const c10::Stream stream = current_stream(values_.device());
  if (!tile_queue_.accepts(received_[i], left.scalar_type(), stream)) flush_tiles();
  const auto new_bytes = [&](const at::Tensor& tensor) {
    const auto same = [&](const at::Tensor& other) { return other.is_alias_of(tensor); };
    const bool counted = std::any_of(tile_queue_.list.begin(), tile_queue_.list.end(),
                                     [&](const TileOperands& p) { return same(p.left) || same(p.right); });
    return counted ? 0 : static_cast<int64_t>(tensor.storage().nbytes());
  };
  const int64_t bytes = new_bytes(left) + new_bytes(right);
  tile_queue_.add({i, left, right, version_of(left), version_of(right)}, received_[i], left.scalar_type(), stream);
  tile_queue_.tiles += tiles_->ends[i] - tiles_->starts[i];
  tile_queue_.bytes += bytes;
  received_[i] = received_tiles_[i] = true;
  if (tile_queue_.tiles >= max_tiles_ || tile_queue_.bytes > max_tile_bytes_) {
    flush_tiles();
  } else {
    finish_after_backward();
  }
  return true;
}

bool GradientBuffer::is_queued(size_t i) const {
  const auto in = [i](const auto& list) {
    return std::any_of(list.begin(), list.end(), [i](const auto& gradient) { return gradient.i == i; });
  };
  return in(tile_queue_.list) || in(gradient_queue_.list);
}

// A backward pass that raised never ended, so the next one has its own callback.
void GradientBuffer::finish_after_backward() {
  const int graph = torch::autograd::get_current_graph_task_id();
  if (graph == -1 || graph == finishing_graph_) return;
  finishing_graph_ = graph;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const std::shared_ptr<GradientBuffer> buffer = weak.lock()) buffer->finish();
  });
}

void GradientBuffer::flush() {
  flush_tiles();
  flush_gradients();
}

template <typename T, typename Add>
void GradientBuffer::add_all(const Queue<T>& queue, Add add) {
  const c10::StreamGuard guard(queue.stream);
  try {
    add();
  } catch (...) {  // the slots still have the values of before
    for (const T& gradient : queue.list) received_[gradient.i] = queue.accumulate;
    throw;
  }
}

void GradientBuffer::flush_tiles() {
  if (tile_queue_.list.empty()) return;
  const Queue<TileOperands> queue = tile_queue_.take();
  used_operands_.insert(used_operands_.end(), queue.list.begin(), queue.list.end());
  add_all(queue, [&] { multiply_tiles_(queue.list, queue.accumulate, found_inf_); });
}

void GradientBuffer::flush_gradients() {
  if (gradient_queue_.list.empty()) return;
  const Queue<Gradient> queue = take_queued_gradients();
  add_all(queue, [&] {
    const auto gather = [&] { gather_(queue.list, queue.accumulate, found_inf_); };
    if (!values_.is_cuda() || queue.bytes < kMinSideStreamBytes || is_captured(queue.stream)) return gather();
    std::vector<at::Tensor> held;
    for (const Gradient& gradient : queue.list) held.push_back(gradient.grad);
    GatherStream::run(std::move(held), queue.stream, gather);
    finish_after_backward();
  });
}

GradientBuffer::Queue<GradientBuffer::Gradient> GradientBuffer::take_queued_gradients() {
  total_queued_bytes -= gradient_queue_.bytes;
  return gradient_queue_.take();
}

void GradientBuffer::set_queue_limits(std::optional<int64_t> tiles, std::optional<int64_t> tile_bytes,
                                      std::optional<int64_t> gradient_bytes) {
  const std::lock_guard lock(mutex_);
  max_tiles_ = tiles.value_or(max_tiles_);
  max_tile_bytes_ = tile_bytes.value_or(max_tile_bytes_);
  max_gradient_bytes_ = gradient_bytes.value_or(max_gradient_bytes_);
}

// The result

void GradientBuffer::finish() {
  const Lock lock(*this);
  flush();
  wait_for_gathers();
}

void GradientBuffer::sum_squares_() {
  finish();
  if (!partial_sums_.defined()) return;
  direct::add_partial_sums_(sum_sq_, partial_sums_, partials_begin_, partials_end_);
}

at::Tensor GradientBuffer::clip(double max_norm) {
  finish();
  SPARSE_OPT_CHECK(can_clip(), "the gradients are not on a GPU");
  at::Tensor result = at::empty({2}, sum_sq_.options());
  direct::add_partial_sums_and_clip_(sum_sq_, partial_sums_, partials_begin_, partials_end_, result, finished_,
                                     max_norm);
  return result;
}

void GradientBuffer::drop() {
  std::vector<Gradient> gradients;  // freed after the lock is released
  const Lock lock(*this);
  wait_for_gathers();
  used_operands_ = tile_queue_.take().list;
  gradients = take_queued_gradients().list;
  received_tiles_.assign(received_tiles_.size(), false);
  received_.assign(received_.size(), false);
}

std::vector<bool> GradientBuffer::received() const {
  const std::lock_guard lock(mutex_);
  return received_;
}

bool GradientBuffer::received_tiles(size_t i) const {
  const std::lock_guard lock(mutex_);
  return received_tiles_.at(i);
}

}  // namespace sparse_opt
