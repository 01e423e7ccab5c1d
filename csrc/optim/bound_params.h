// A list of parameters and their segments, turned into C++ once. A step of a model then hands over one object where it
// would convert hundreds of tensors and integers, and finds the dense gradients itself.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace sparse_opt {

class BoundParams : public std::enable_shared_from_this<BoundParams> {
 public:
  BoundParams(std::vector<at::Tensor> params, at::Tensor indices, std::vector<int64_t> starts,
              std::vector<int64_t> ends, int64_t run_length, std::optional<at::Tensor> index_bases);
  ~BoundParams();

  // Whether any parameter has a gradient.
  bool has_grads() const;

  // Hold every parameter's gradient, made contiguous, for the next step. False, and none held, if one has none, or
  // one that is not strided or of another shape.
  bool take_grads();

  // masked_grad_gather_ of parameter i's gradient into its slots of `out`, [nnz], added to what was received there. The
  // elements of `sum_sq`, [n], of the parameters gathered are valid once sum_squares_ was called: a GPU adds up those
  // of all parameters in one launch.
  void gather_(int64_t i, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& sum_sq,
               const std::optional<at::Tensor>& found_inf);
  void sum_squares_(const at::Tensor& sum_sq);

  // What the hooks of gradient_hook.h do while they are told to: gather_ the gradient that parameter i has into the
  // buffers named here, and let it go. False, and nothing done, if they are told not to, or it has none or one that is
  // not strided. On a GPU gradients wait for each other, as tiles do, and are gathered beside the backward pass, on a
  // stream of its own; they are held until the next ones are gathered, the pass ends, or flush() is called.
  void receive_into(const at::Tensor& out, const at::Tensor& sum_sq);
  // Once set_receiving(false) has returned, nothing is being received.
  void set_receiving(bool receiving);
  bool receive(size_t i);

  // The active tiles of those parameters that have any: tile_weight_grad_'s table, and each parameter's rows of it. The
  // parameters are matrices as they are now.
  void set_tiles(at::Tensor tiles, std::vector<int64_t> starts, std::vector<int64_t> ends, int64_t tile_size);

  // tile_weight_grad_ of parameter i, whose gradient is left^T @ right ([tokens, rows] and [tokens, columns]), into its
  // slots of `out`, as gather_ does.
  void tile_grad_(int64_t i, const at::Tensor& left, const at::Tensor& right, const at::Tensor& out,
                  const at::Tensor& sum_sq, const std::optional<at::Tensor>& found_inf);

  // Put a gradient of parameter i, fp32 [its slots], into its slots of `out`, or add it to what was received there;
  // `sum_sq` stands when it does after gather_.
  void add_values_(int64_t i, const at::Tensor& values, const at::Tensor& out, const at::Tensor& sum_sq,
                   const std::optional<at::Tensor>& found_inf);

  // What a linear layer's backward function calls: tile_grad_ into the buffers of receive_into, but not at once. Few
  // tiles leave a GPU idle, so gradients wait for each other: until there are enough, until they hold too much memory,
  // until one of them cannot go with the others, until the backward pass ends, or until flush(). While told not to
  // receive, whatever take_tiles_with named is asked, with no lock held. False, and nothing done, if that does not take
  // it either.
  using TakeTiles = std::function<bool(size_t i, const at::Tensor& left, const at::Tensor& right)>;
  bool receive_tiles(size_t i, const at::Tensor& left, const at::Tensor& right);
  void take_tiles_with(TakeTiles take) { take_tiles_ = std::move(take); }
  void flush();  // the buffers may be read after it, on the stream that is current
  // Forget all that was received, and the gradients held. Nothing is written: the next gradients overwrite it.
  void drop();
  // Autograd calls hooks also where it was given no gradient: whether that is because tiles came, since drop().
  bool came_by_tiles(size_t i) const;
  // When gradients stop waiting: those by tiles, and those that hooks receive. The numbers that hold unless they are
  // set: see bound_gradients.cpp.
  void set_waiting(int64_t tiles, int64_t bytes);
  void set_waiting_grads(int64_t bytes);

  // Of each parameter: whether a gradient is in the buffer, for the next one to be added to.
  std::vector<bool> received() const;
  void set_received(std::vector<bool> received);
  const at::Tensor& param(size_t i) const { return params_.at(i); }

  // The step op on the list. `arguments` are those of its schema; set here are the ones that are bound, count_steps,
  // and, unless `grad` is given, dense_grads: the gradients held, which are released. Bumps the parameters' versions,
  // because kernels write through pointers, which autograd does not see. With check_only the arguments are checked and
  // nothing else happens; the gradients stay held.
  void step(const c10::OperatorHandle& op, torch::jit::Stack arguments);

 private:
  c10::IValue held_grads(bool keep);
  void check_numels() const;
  void bump_versions() const;

  // A gradient, and what one is made of, held as it was when it came.
  struct Gradient {
    size_t i;
    at::Tensor grad;
  };
  struct TileOperands {
    size_t i;
    at::Tensor left, right;
    uint32_t left_version, right_version;
  };
  // Those that wait for each other, since they are alike.
  template <typename T>
  struct Waiting {
    c10::Stream stream;  // theirs, and so is their memory
    std::vector<T> list = {};
    bool accumulate = false;
    at::ScalarType dtype = at::kFloat;
    int64_t tiles = 0, bytes = 0;

    bool takes(bool accumulates, at::ScalarType its_dtype, c10::Stream its_stream) const {
      return list.empty() || (accumulate == accumulates && dtype == its_dtype && stream == its_stream);
    }
    void add(T gradient, bool accumulates, at::ScalarType its_dtype, c10::Stream its_stream) {
      list.push_back(std::move(gradient));
      accumulate = accumulates;
      dtype = its_dtype;
      stream = its_stream;
    }
    Waiting take() { return std::exchange(*this, Waiting{stream}); }
  };
  enum class Pass : uint8_t { kNone, kGather, kTiles, kAdded };
  static c10::Stream current_stream(at::Device device);
  int64_t enough_grad_bytes() const;
  void lay_out_partial_sums();
  void begin_pass(size_t i, Pass pass);
  void wait_for_last_stream();
  void finish_gathers();
  void check_gradient(int64_t i, const at::Tensor& grad) const;
  void gather_list_(const std::vector<Gradient>& list, const at::Tensor& out, bool accumulate, const at::Tensor& sum_sq,
                    const std::optional<at::Tensor>& found_inf);
  void check_tile_operands(int64_t i, const at::Tensor& left, const at::Tensor& right) const;
  void tile_grads_(const std::vector<TileOperands>& list, const at::Tensor& out, bool accumulate,
                   const at::Tensor& sum_sq, const std::optional<at::Tensor>& found_inf);
  bool waits(size_t i) const;
  template <typename T, typename Put>
  void put(const Waiting<T>& now, Put put);
  void flush_tiles();
  void flush_grads();
  void flush_locked();
  Waiting<Gradient> take_waiting_grads();
  void flush_at_the_end();

  std::vector<at::Tensor> params_, grads_;
  at::Tensor indices_;  // [nnz / run_length]
  std::vector<int64_t> starts_, ends_, numels_;
  int64_t run_length_;
  std::optional<at::Tensor> index_bases_;
  const std::vector<std::pair<const char*, c10::IValue>> bound_;  // the arguments of step() that do not change
  std::vector<std::optional<at::Tensor>> own_bases_;              // of each parameter, for a call with it alone
  // On a GPU: fp32, what the passes over each parameter left for sum_squares_. A parameter's range holds those of the
  // pass that leaves the most; what the last pass did not write is 0.
  at::Tensor partial_sums_;
  std::vector<int64_t> first_partial_, partials_begin_, partials_end_;  // the last two as sum_partials takes segments
  std::vector<Pass> last_pass_;
  at::Tensor out_, sum_sq_;  // of receive
  std::vector<bool> received_;
  bool receiving_ = false;

  at::Tensor tiles_;  // [tiles, 4]
  std::vector<int64_t> tile_starts_, tile_ends_;
  std::vector<std::pair<int64_t, int64_t>> matrices_;  // rows and columns of the parameters that have tiles
  int64_t tile_size_ = 0;
  TakeTiles take_tiles_;
  std::vector<char> came_by_tiles_;
  // Backward passes of several threads may meet here: for all that a gradient's arrival reads or changes. The ops are
  // called under it, so what sees them called (a dispatch mode) must not call back. Since a dispatch mode takes the
  // interpreter's lock, no thread may wait for this mutex while it holds that one.
  mutable std::mutex mutex_;
  Waiting<TileOperands> waiting_tiles_;
  Waiting<Gradient> waiting_grads_;
  int64_t most_tiles_ = 0, most_bytes_ = 0, most_grad_bytes_ = 0;
  c10::Stream last_stream_;  // of the last pass over the buffers
  int ending_graph_ = -1;    // the backward pass at whose end flush() will be called
};

}  // namespace sparse_opt
