#include "gradient_buffer.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <limits>

#include "calls.h"
#include "error_text.h"
#include "native_calls.h"

namespace sparse_opt {
namespace {

// Tiles that are multiplied at once: about four tiles of 64, or one of 128, for each multiprocessor of an H200.
int64_t max_queued_tiles(int64_t tile_size) {
  return tile_size == 64 ? 528 : 132;
}
constexpr int64_t kMaxTileBytes = int64_t{512} << 20;

// On a GPU the gradients of one buffer are queued up to this memory, or up to this part of the memory of all of its
// gradients; longer lists are worth a launch.
constexpr int64_t kMaxGradientBytes = int64_t{128} << 20, kGradientParts = 16;

int64_t max_queued_gradient_bytes(const BoundParams& bound) {
  if (!bound.indices.is_cuda()) return 0;
  int64_t bytes = 0;
  for (const at::Tensor& param : bound.params) bytes += static_cast<int64_t>(param.nbytes());
  return std::min(kMaxGradientBytes, bytes / kGradientParts);
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Whether the stream is being captured in a CUDA graph: then it must not wait for work outside of the graph, and work
// outside must not wait for it.
bool is_captured(c10::Stream stream) {
  if (stream.device_type() != at::kCUDA) return false;
  const c10::StreamGuard current(stream);  // torch 2.10 has no Stream::native_handle()
  return kernels->is_capturing(stream.device_index());
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes());
}

}  // namespace

// Holds the mutex, and afterwards frees what has been added: gradients and operands may have a graph, whose nodes may
// run any code.
class GradientBuffer::Lock {
 public:
  explicit Lock(GradientBuffer& buffer) : buffer_(buffer), lock_(buffer.mutex_) {}
  ~Lock() { used_ = std::exchange(buffer_.used_, {}); }

 private:
  GradientBuffer& buffer_;
  std::vector<Gradient> used_;
  const std::lock_guard<std::mutex> lock_;  // released before used_
};

GradientBuffer::GradientBuffer(std::shared_ptr<const BoundParams> bound, at::Tensor values, at::Tensor sum_sq,
                               std::optional<Tiles> tiles)
    : bound_(std::move(bound)),
      values_(std::move(values)),
      sum_sq_(std::move(sum_sq)),
      tiles_(std::move(tiles)),
      last_pass_(bound_->params.size(), Pass::kNone),
      received_(bound_->params.size()),
      received_tiles_(bound_->params.size()),
      gradients_{current_stream(values_.device())},
      tile_products_{gradients_.stream},
      max_gradient_bytes_(max_queued_gradient_bytes(*bound_)),
      last_stream_(gradients_.stream) {
  if (tiles_.has_value()) {
    max_tiles_ = max_queued_tiles(tiles_->tile_size);
    max_tile_bytes_ = kMaxTileBytes;
    for (size_t i = 0; i < bound_->params.size(); ++i) {
      const at::Tensor& param = bound_->params[i];
      matrices_.emplace_back(tiles_->has(i) ? param.size(-2) : 0, tiles_->has(i) ? param.size(-1) : 0);
    }
  }
  if (values_.is_cuda()) allocate_partial_sums();
}

void GradientBuffer::allocate_partial_sums() {
  int64_t partials = 0;
  for (size_t i = 0; i < last_pass_.size(); ++i) {
    const int64_t tiles = tiles_.has_value() ? tiles_->ends[i] - tiles_->starts[i] : 0;
    const int64_t capacity = std::max(gather_blocks(bound_->starts[i], bound_->ends[i]), tiles);
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
void GradientBuffer::begin_pass(const std::vector<Gradient>& list, Pass pass) {
  if (!partial_sums_.defined()) return;
  captured_ = captured_ || is_captured(current_stream(values_.device()));
  std::vector<at::Tensor> stale;
  for (const Gradient& gradient : list) {
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

// Queues

bool GradientBuffer::is_queued(size_t i) const {
  const auto in = [i](const Queue& queue) {
    return std::any_of(queue.list.begin(), queue.list.end(), [i](const Gradient& gradient) { return gradient.i == i; });
  };
  return in(gradients_) || in(tile_products_);
}

void GradientBuffer::enqueue(Queue& queue, Gradient gradient, int64_t bytes) {
  if (is_queued(gradient.i)) flush_all();
  const c10::Stream stream = current_stream(values_.device());
  const at::ScalarType dtype = gradient.left.scalar_type();
  const bool accumulate = received_[gradient.i];
  const bool of_experts =
      gradient.token_offsets.has_value() || (!queue.list.empty() && queue.list.front().token_offsets.has_value());
  if (queue.accumulate != accumulate || queue.dtype != dtype || queue.stream != stream || of_experts) flush(queue);
  received_[gradient.i] = true;
  queue.list.push_back(std::move(gradient));
  queue.accumulate = accumulate;
  queue.dtype = dtype;
  queue.stream = stream;
  queue.bytes += bytes;
}

void GradientBuffer::flush(Queue& queue) {
  if (queue.list.empty()) return;
  const bool tiles = &queue == &tile_products_;
  const Queue taken = std::exchange(queue, Queue{queue.stream});
  used_.insert(used_.end(), taken.list.begin(), taken.list.end());
  const c10::StreamGuard guard(taken.stream);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  try {
    tiles ? multiply_tiles_(taken) : gather_(taken);
  } catch (...) {  // the slots still have the values of before
    for (const Gradient& gradient : taken.list) received_[gradient.i] = taken.accumulate;
    throw;
  }
}

void GradientBuffer::flush_all() {
  flush(tile_products_);
  flush(gradients_);
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

void GradientBuffer::set_queue_limits(std::optional<int64_t> tiles, std::optional<int64_t> tile_bytes,
                                      std::optional<int64_t> gradient_bytes) {
  const std::lock_guard lock(mutex_);
  max_tiles_ = tiles.value_or(max_tiles_);
  max_tile_bytes_ = tile_bytes.value_or(max_tile_bytes_);
  max_gradient_bytes_ = gradient_bytes.value_or(max_gradient_bytes_);
}

// Dense gradients

// The Python hook gets other gradients, and raises an error with the parameter's name.
bool GradientBuffer::can_gather(size_t i, const at::Tensor& grad) const {
  const at::ScalarType dtype = grad.scalar_type();
  return grad.layout() == at::kStrided && grad.numel() == bound_->numels[i] &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
}

bool GradientBuffer::receive(size_t i) {
  at::Tensor taken;  // freed after the lock is released, as by Lock
  const Lock lock(*this);
  at::Tensor& grad = bound_->params[i].mutable_grad();
  if (!direct_) return false;
  if (!grad.defined() && received_tiles_.at(i)) return true;
  if (!grad.defined() || !can_gather(i, grad)) return false;
  taken = std::exchange(grad, at::Tensor());
  add_dense(i, taken);
  return true;
}

void GradientBuffer::add_dense_(int64_t i, const at::Tensor& grad) {
  const Lock lock(*this);
  add_dense(static_cast<size_t>(i), grad);
}

void GradientBuffer::add_dense(size_t i, const at::Tensor& grad) {
  SPARSE_OPT_CHECK(grad.numel() == bound_->numels.at(i), "the gradient of params[", i, "] has ", grad.numel(),
                   " elements, expected ", bound_->numels[i]);
  const int64_t bytes = storage_bytes(grad);
  // Another owner of the memory could write to it while the gradient is queued.
  const bool can_queue = max_gradient_bytes_ > 0 && bytes <= kMaxGradientBytes && grad.storage().use_count() == 1;
  if (!can_queue || gradients_.bytes + bytes > max_gradient_bytes_) flush(gradients_);
  enqueue(gradients_, {i, grad.requires_grad() ? grad.detach() : grad}, bytes);
  if (!can_queue || gradients_.bytes >= max_gradient_bytes_) {
    flush(gradients_);
  } else {
    finish_after_backward();
  }
}

void GradientBuffer::gather_(const Queue& queue) {
  wait_for_last_stream();
  if (!partial_sums_.defined()) {
    for (const Gradient& gradient : queue.list) {
      bound_->gather(values_, {{gradient.left.contiguous()}}, std::nullopt, queue.accumulate,
                     sum_sq_.narrow(0, static_cast<int64_t>(gradient.i), 1), found_inf_, gradient.i);
    }
    return;
  }
  std::vector<at::Tensor> grads;
  std::vector<int64_t> starts, ends, numbers, first_partials;
  for (const Gradient& gradient : queue.list) {
    grads.push_back(gradient.left.contiguous());
    starts.push_back(bound_->starts[gradient.i]);
    ends.push_back(bound_->ends[gradient.i]);
    numbers.push_back(static_cast<int64_t>(gradient.i));
    first_partials.push_back(first_partial_[gradient.i]);
  }
  begin_pass(queue.list, Pass::kGather);
  const auto n = static_cast<int64_t>(last_pass_.size());
  const auto direct = [&] {
    const std::vector<TensorView> list = views_of(grads);
    const TensorView sums = view_of(partial_sums_);
    const GatherCall call(view_of(values_), list, view_of(bound_->indices), starts, ends, std::nullopt,
                          queue.accumulate, std::nullopt, view_of(found_inf_), bound_->run_length,
                          view_of(bound_->index_bases), n);
    check_partly(starts, ends, numbers, n, sums, first_partials);
    kernels->gather_partly(call.args, sums.as<float>(), first_partials.data(), numbers.data(),
                           values_.device().index());
  };
  call_native("sparse_opt_native::gather_partly_", direct, values_, grads, bound_->indices, starts, ends, numbers, n,
              queue.accumulate, partial_sums_, first_partials, found_inf_, bound_->run_length, bound_->index_bases);
}

// Active tiles of products

bool GradientBuffer::receive_tiles(size_t i, const at::Tensor& left, const at::Tensor& right) {
  const Lock lock(*this);
  if (!direct_ || left.size(-1) * right.size(-1) != bound_->numels.at(i)) return false;
  check_tile_operands(i, left, right);
  queue_tiles(i, left, right);
  if (tile_products_.tiles >= max_tiles_ || tile_products_.bytes > max_tile_bytes_) {
    flush(tile_products_);
  } else {
    finish_after_backward();
  }
  return true;
}

void GradientBuffer::add_tiles_(const std::vector<int64_t>& which, const std::vector<at::Tensor>& lefts,
                                const std::vector<at::Tensor>& rights,
                                const std::vector<std::optional<at::Tensor>>& token_offsets) {
  const Lock lock(*this);
  for (size_t k = 0; k < which.size(); ++k) check_tile_operands(which[k], lefts.at(k), rights.at(k));
  flush(tile_products_);  // the order of a product's additions may depend on the others of its launch
  for (size_t k = 0; k < which.size(); ++k) queue_tiles(which[k], lefts[k], rights[k], token_offsets.at(k));
  flush(tile_products_);
}

void GradientBuffer::check_tile_operands(size_t i, const at::Tensor& left, const at::Tensor& right) const {
  SPARSE_OPT_CHECK(tiles_.has_value() && tiles_->has(i), "params[", i, "] has no tiles");
  const auto& [rows, columns] = matrices_[i];
  SPARSE_OPT_CHECK(left.size(-1) == rows && right.size(-1) == columns, "params[", i, "] has sizes [", left.size(-1),
                   ", ", right.size(-1), "], but had [", rows, ", ", columns, "] when its mask was bound");
}

void GradientBuffer::queue_tiles(size_t i, const at::Tensor& left, const at::Tensor& right,
                                 const std::optional<at::Tensor>& token_offsets) {
  const auto new_bytes = [&](const at::Tensor& tensor) {
    const bool counted = std::any_of(tile_products_.list.begin(), tile_products_.list.end(), [&](const Gradient& p) {
      return p.left.is_alias_of(tensor) || p.right.is_alias_of(tensor);
    });
    return counted ? 0 : storage_bytes(tensor);
  };
  const int64_t bytes = new_bytes(left) + new_bytes(right);
  enqueue(tile_products_, {i, left, right, version_of(left), version_of(right), token_offsets}, bytes);
  tile_products_.tiles += tiles_->ends[i] - tiles_->starts[i];
  received_tiles_[i] = true;
}

void GradientBuffer::multiply_tiles_(const Queue& queue) {
  wait_for_last_stream();
  const auto& [table, tile_starts, tile_ends, tile_size] = *tiles_;
  std::vector<at::Tensor> lefts, rights;
  std::vector<int64_t> starts, ends, first_partials;
  for (const Gradient& p : queue.list) {
    SPARSE_OPT_CHECK(version_of(p.left) == p.left_version && version_of(p.right) == p.right_version,
                     "the input or the output gradient of the layer with params[", p.i,
                     "] was changed in place before its weight gradient was computed; build the optimizer with "
                     "tile_backward=False");
    lefts.push_back(p.left.contiguous());
    rights.push_back(p.right.contiguous());
    starts.push_back(tile_starts[p.i]);
    ends.push_back(tile_ends[p.i]);
    if (partial_sums_.defined()) first_partials.push_back(first_partial_[p.i]);
  }
  begin_pass(queue.list, Pass::kTiles);
  const std::optional<at::Tensor>& token_offsets = queue.list.front().token_offsets;
  // On a CPU the op writes one sum for each product, and the products may be of any of the parameters.
  at::Tensor sums = partial_sums_;
  if (!sums.defined()) sums = at::empty({static_cast<int64_t>(lefts.size())}, sum_sq_.options());
  const auto direct = [&] {
    const std::vector<TensorView> left_views = views_of(lefts), right_views = views_of(rights);
    const TensorView sum_view = view_of(sums);
    TileCall call(view_of(values_), left_views, right_views, view_of(table), starts, ends, tile_size, queue.accumulate,
                  view_of(found_inf_));
    call.set_token_offsets(view_of(token_offsets), view_of(values_).device);
    if (partial_sums_.defined()) {
      call.check_partly(sum_view, first_partials);
      kernels->tiles_partly(call.args, sum_view.as<float>(), first_partials.data(), values_.device().index());
    } else {
      call.args.sum_sq = sum_view.as<float>();
      kernels->cpu.tiles(call.args, -1);
    }
  };
  if (partial_sums_.defined()) {
    call_native("sparse_opt_native::tile_weight_grad_partly_", direct, values_, lefts, rights, table, starts, ends,
                tile_size, queue.accumulate, sums, first_partials, found_inf_, token_offsets);
    return;
  }
  call_native("sparse_opt_native::tile_weight_grad_", direct, values_, lefts, rights, table, starts, ends, tile_size,
              std::optional<at::Tensor>(), queue.accumulate, sums, found_inf_, token_offsets);
  for (size_t k = 0; k < queue.list.size(); ++k)
    sum_sq_.mutable_data_ptr<float>()[queue.list[k].i] = sums.const_data_ptr<float>()[k];
}

// Active elements

void GradientBuffer::add_values_(int64_t i, const at::Tensor& values) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Lock lock(*this);
  if (is_queued(i)) flush_all();
  wait_for_last_stream();
  const at::Tensor slots = values_.narrow(0, bound_->starts.at(i), bound_->ends[i] - bound_->starts[i]);
  if (received_[i]) {
    slots.add_(values);  // the sum is rounded once
  } else {
    slots.copy_(values);
  }
  const at::Tensor stored = slots.to(at::kFloat);
  begin_pass({Gradient{static_cast<size_t>(i), {}}}, Pass::kValues);
  (partial_sums_.defined() ? partial_sums_.narrow(0, first_partial_[i], 1) : sum_sq_.narrow(0, i, 1))
      .copy_(stored.square().sum());
  if (found_inf_.has_value()) {
    found_inf_->masked_fill_(stored.isfinite().all().logical_not_(), std::numeric_limits<double>::infinity());
  }
  received_[i] = received_tiles_[i] = true;
}

void GradientBuffer::set_found_inf(std::optional<at::Tensor> found_inf) {
  const std::lock_guard lock(mutex_);
  found_inf_.swap(found_inf);
}

void GradientBuffer::set_direct(bool direct) {
  const std::lock_guard lock(mutex_);
  direct_ = direct;
}

// The result

void GradientBuffer::finish() {
  const Lock lock(*this);
  flush_all();
  wait_for_last_stream();
}

void GradientBuffer::sum_squares_() {
  finish();
  if (partial_sums_.defined()) sum_partials(std::nullopt, 0.0);
}

std::optional<at::Tensor> GradientBuffer::clip(double max_norm) {
  if (!partial_sums_.defined()) return std::nullopt;
  finish();
  const at::Tensor result = at::empty({2}, sum_sq_.options());
  sum_partials(result, max_norm);
  return result;
}

void GradientBuffer::sum_partials(const std::optional<at::Tensor>& clip, double max_norm) const {
  const std::optional<at::Tensor> finished = clip.has_value() ? std::optional(finished_) : std::nullopt;
  const auto direct = [&] {
    const TensorView partials = view_of(partial_sums_);
    const SumCall call(view_of(sum_sq_), partials, partials_begin_, partials_end_, view_of(clip), view_of(finished),
                       max_norm);
    kernels->sum_partials(call.segments, partials.as<const float>(), call.sums, call.clip, partials.device.index);
  };
  call_native("sparse_opt_native::add_partial_sums_", direct, sum_sq_, partial_sums_, partials_begin_, partials_end_,
              clip, finished, max_norm);
}

void GradientBuffer::drop() {
  const Lock lock(*this);
  wait_for_last_stream();
  for (Queue* queue : {&gradients_, &tile_products_}) {
    used_.insert(used_.end(), queue->list.begin(), queue->list.end());
    *queue = Queue{queue->stream};
  }
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
