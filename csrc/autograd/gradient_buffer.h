// The compact gradient of a list of parameters, [nnz], and what fills it during a backward pass. Several autograd
// threads may call it at the same time.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bound_params.h"

namespace sparse_opt {

// The active tiles of those parameters that have any; these are matrices, or the stacked matrices of experts.
struct Tiles {
  at::Tensor table;                   // [tiles, 4], as tile_weight_grad_ takes it
  std::vector<int64_t> starts, ends;  // of each parameter's rows in the table
  int64_t tile_size;

  bool has(size_t i) const { return starts.at(i) < ends.at(i); }
};

class GradientBuffer : public std::enable_shared_from_this<GradientBuffer> {
 public:
  // `values`, [nnz], receives the gradients. `sum_sq`, [n] fp32, receives the sums of squares of the parameters that
  // have a gradient; it is valid after sum_squares_().
  GradientBuffer(std::shared_ptr<const BoundParams> bound, at::Tensor values, at::Tensor sum_sq,
                 std::optional<Tiles> tiles);

  // Add a gradient of parameter i. The first one after drop() overwrites the parameter's slots. On a GPU gradients are
  // queued until there are enough of them, until one has another dtype or stream, until the backward pass ends, or
  // until finish(); then one launch gathers them.
  void add_dense_(int64_t i, const at::Tensor& grad);
  // Add the active tiles of left^T @ right, of [tokens, rows] and [tokens, columns], of each of these parameters. One
  // launch computes all that have one dtype, and are all the first ones of their parameters or none of them. For
  // experts there are token_offsets, as in tiles.h, and each has a launch of its own.
  void add_tiles_(const std::vector<int64_t>& which, const std::vector<at::Tensor>& lefts,
                  const std::vector<at::Tensor>& rights, const std::vector<std::optional<at::Tensor>>& token_offsets);
  // Add the gradient's active elements: fp32, [the parameter's slots].
  void add_values_(int64_t i, const at::Tensor& values);
  // Set to inf when a gradient that is added is not finite.
  void set_found_inf(std::optional<at::Tensor> found_inf);

  // Whether receive and receive_tiles accept gradients. Once set_direct(false) has returned, none is being received.
  void set_direct(bool direct);
  // Take the gradient from parameter i and add it. Returns false, and does nothing, if gradients are not accepted or
  // the parameter has none that is strided.
  bool receive(size_t i);
  // Add the active tiles of left^T @ right. Few tiles leave a GPU idle, so products are queued until there are enough
  // of them, until they hold too much memory, until one has another dtype or stream, until the backward pass ends, or
  // until finish(). Returns false, and does nothing, if gradients are not accepted.
  bool receive_tiles(size_t i, const at::Tensor& left, const at::Tensor& right);

  // Add all queued gradients. Afterwards `values` may be read on the current stream.
  void finish();
  void sum_squares_();
  // [2]: the norm of all gradients and the factor that clips them to max_norm; sum_squares_() is included. Only on a
  // GPU, where every parameter must have a gradient.
  std::optional<at::Tensor> clip(double max_norm);
  // Discard all gradients, queued ones included. Nothing is written: the next gradients overwrite the slots.
  void drop();

  // For each parameter, whether it has received a gradient since drop().
  std::vector<bool> received() const;
  // Whether parameter i has received tiles since drop(). Autograd then calls its hook without a gradient.
  bool received_tiles(size_t i) const;

  // Change how much may be queued; limits that are not given stay. The defaults are in gradient_buffer.cpp.
  void set_queue_limits(std::optional<int64_t> tiles, std::optional<int64_t> tile_bytes,
                        std::optional<int64_t> gradient_bytes);

  const BoundParams& bound() const { return *bound_; }

 private:
  // A gradient of parameter i: the dense one, or the operands of the product whose active tiles it is.
  struct Gradient {
    size_t i;
    at::Tensor left;  // or the dense gradient
    at::Tensor right = {};
    uint32_t left_version = 0, right_version = 0;  // to notice changes in place
    std::optional<at::Tensor> token_offsets = {};  // of experts
  };
  // Gradients that one launch can add: all of one dtype, from one stream, and all the first ones or none of them.
  struct Queue {
    c10::Stream stream;
    std::vector<Gradient> list = {};
    bool accumulate = false;
    at::ScalarType dtype = at::kFloat;
    int64_t tiles = 0, bytes = 0;
  };
  enum class Pass : uint8_t { kNone, kGather, kTiles, kValues };
  class Lock;

  void allocate_partial_sums();
  void begin_pass(const std::vector<Gradient>& list, Pass pass);
  void wait_for_last_stream();
  bool is_queued(size_t i) const;
  void enqueue(Queue& queue, Gradient gradient, int64_t bytes);
  void flush(Queue& queue);
  void flush_all();
  void add_dense(size_t i, const at::Tensor& grad);
  bool can_gather(size_t i, const at::Tensor& grad) const;
  void check_tile_operands(size_t i, const at::Tensor& left, const at::Tensor& right) const;
  void queue_tiles(size_t i, const at::Tensor& left, const at::Tensor& right,
                   const std::optional<at::Tensor>& token_offsets = {});
  void gather_(const Queue& queue);
  void multiply_tiles_(const Queue& queue);
  void finish_after_backward();
  // To sum_sq_ and, if given, [2]: the norm of all gradients and the factor that clips them.
  void sum_partials(const std::optional<at::Tensor>& clip, double max_norm) const;

  const std::shared_ptr<const BoundParams> bound_;
  const at::Tensor values_, sum_sq_;
  const std::optional<Tiles> tiles_;
  std::vector<std::pair<int64_t, int64_t>> matrices_;  // rows and columns of the parameters that have tiles
  // On a GPU: fp32 sums of squares of the blocks of each pass, which sum_squares_ adds up. A parameter has space for
  // the pass with the most blocks; the elements that its last pass has not written are 0.
  at::Tensor partial_sums_;
  at::Tensor finished_;                                                 // blocks of the running clip(): int32 [1]
  std::vector<int64_t> first_partial_, partials_begin_, partials_end_;  // the last two as sum_partials takes segments
  std::vector<Pass> last_pass_;
  bool captured_ = false;  // a pass has been captured in a CUDA graph

  // Protects the following. The ops are called while it is held, and a dispatch mode, which runs Python, sees them: no
  // thread may wait for this mutex while it holds the interpreter's lock, and the mode must not call back.
  mutable std::mutex mutex_;
  std::vector<bool> received_, received_tiles_;
  bool direct_ = false;
  std::optional<at::Tensor> found_inf_;
  Queue gradients_, tile_products_;
  std::vector<Gradient> used_;  // see Lock
  int64_t max_gradient_bytes_ = 0, max_tiles_ = 0, max_tile_bytes_ = 0;
  c10::Stream last_stream_;   // of the last pass over the buffers
  int finishing_graph_ = -1;  // the backward pass at whose end finish() will be called
};

}  // namespace sparse_opt
