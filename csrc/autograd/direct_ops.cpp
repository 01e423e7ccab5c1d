#include "direct_ops.h"

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <deque>
#include <string_view>

#include "calls.h"
#include "step_op.h"
#include "tensor_views.h"

namespace sparse_opt::direct {
namespace {

using OptionalAtTensor = std::optional<at::Tensor>;

const KernelTable* loaded = nullptr;

const KernelTable::OfDevice& of(const at::Tensor& tensor) {
  return tensor.is_cuda() ? loaded->cuda : loaded->cpu;
}

bool is_dispatched() {
  return c10::impl::dispatch_mode_enabled();
}

// Converts the arguments of a boxed call, and holds the lists.
class Reader {
 public:
  Reader(const std::vector<c10::Argument>& schema, const torch::jit::Stack& stack) : schema_(schema), stack_(stack) {}

  void operator()(const char* name, auto& input) {
    TORCH_INTERNAL_ASSERT(next_ < stack_.size() && schema_[next_].name() == name, "the schema has no argument ", name,
                          " at ", next_);
    read(stack_[next_++], input);
  }

 private:
  void read(const c10::IValue& value, TensorView& view) { view = view_of(value.toTensor()); }
  void read(const c10::IValue& value, TensorList& views) {
    std::vector<TensorView>& held = lists_.emplace_back();
    const c10::ArrayRef<c10::IValue> tensors = value.toListRef();
    held.reserve(tensors.size());
    for (const c10::IValue& tensor : tensors) held.push_back(view_of(tensor.toTensor()));
    views = held;
  }
  void read(const c10::IValue& value, Ints& numbers) { numbers = numbers_.emplace_back(value.toIntVector()); }
  void read(const c10::IValue& value, int64_t& number) { number = value.toInt(); }
  void read(const c10::IValue& value, double& number) { number = value.toDouble(); }
  void read(const c10::IValue& value, bool& flag) { flag = value.toBool(); }
  template <typename T>
  void read(const c10::IValue& value, std::optional<T>& input) {
    input.reset();
    if (!value.isNone()) read(value, input.emplace());
  }

  const std::vector<c10::Argument>& schema_;
  const torch::jit::Stack& stack_;
  size_t next_ = 0;
  std::deque<std::vector<TensorView>> lists_;
  std::deque<std::vector<int64_t>> numbers_;
};

template <typename Rule>
void step_by(int number, const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  Reader read(op.schema().arguments(), arguments);
  StepInputs<Rule> inputs;
  inputs.for_each(read);
  const StepCall<Rule> call(inputs);
  if (inputs.check_only) return;
  const Device device = inputs.indices.device;
  const KernelTable::OfDevice& kernels = device.type == DeviceType::CUDA ? loaded->cuda : loaded->cpu;
  kernels.step[number](call.args, &inputs.options, device.index);
}

template <typename Signature>
auto dispatched(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Lists = at::TensorList;
using Numbers = at::IntArrayRef;

}  // namespace

void set_table(const KernelTable& table) {
  loaded = &table;
}

const KernelTable& table() {
  return *loaded;
}

void step(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  const bool check_only = arguments.back().toBool();  // unseen by dispatch modes
  if (!check_only && is_dispatched()) return op.callBoxed(arguments);
  RECORD_FUNCTION(op.operator_name().name, c10::ArrayRef<const c10::IValue>());
  std::string_view name = op.operator_name().name;
  name.remove_prefix(name.rfind(':') + 1);
#define SPARSE_OPT_STEP(Rule) \
  if (name == Rule::kOp) return step_by<Rule>(k##Rule, op, arguments);
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_STEP)
#undef SPARSE_OPT_STEP
  TORCH_INTERNAL_ASSERT(false, "no rule has the op ", name);
}

void masked_grad_gather_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                         at::IntArrayRef ends, const OptionalAtTensor& scale, bool accumulate,
                         const OptionalAtTensor& sum_sq, const OptionalAtTensor& found_inf, int64_t run_length,
                         const OptionalAtTensor& index_bases) {
  if (is_dispatched()) {
    using Signature = void(const at::Tensor&, Lists, const at::Tensor&, Numbers, Numbers, const OptionalAtTensor&, bool,
                           const OptionalAtTensor&, const OptionalAtTensor&, int64_t, const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::masked_grad_gather_");
    return op.call(out, dense, indices, starts, ends, scale, accumulate, sum_sq, found_inf, run_length, index_bases);
  }
  RECORD_FUNCTION("sparse_opt_native::masked_grad_gather_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> list = views_of(dense);
  const GatherCall call(view_of(out), list, view_of(indices), view_of(starts), view_of(ends), view_of(scale),
                        accumulate, view_of(sum_sq), view_of(found_inf), run_length, view_of(index_bases));
  of(indices).gather(call.args, indices.device().index());
}

void indexed_replace_(at::TensorList dense, const at::Tensor& before, const at::Tensor& after,
                      const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends, int64_t run_length,
                      const OptionalAtTensor& index_bases) {
  if (is_dispatched()) {
    using Signature = void(Lists, const at::Tensor&, const at::Tensor&, const at::Tensor&, Numbers, Numbers, int64_t,
                           const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::indexed_replace_");
    return op.call(dense, before, after, indices, starts, ends, run_length, index_bases);
  }
  RECORD_FUNCTION("sparse_opt_native::indexed_replace_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> list = views_of(dense);
  const ReplaceCall call(list, view_of(before), view_of(after), view_of(indices), view_of(starts), view_of(ends),
                         run_length, view_of(index_bases));
  of(indices).replace(call.args, indices.device().index());
}

void indexed_swap_(at::TensorList dense, const at::Tensor& compact, const at::Tensor& indices, at::IntArrayRef starts,
                   at::IntArrayRef ends, int64_t run_length, const OptionalAtTensor& index_bases) {
  if (is_dispatched()) {
    using Signature =
        void(Lists, const at::Tensor&, const at::Tensor&, Numbers, Numbers, int64_t, const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::indexed_swap_");
    return op.call(dense, compact, indices, starts, ends, run_length, index_bases);
  }
  RECORD_FUNCTION("sparse_opt_native::indexed_swap_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> list = views_of(dense);
  const MoveCall call(list, "compact", view_of(compact), view_of(indices), view_of(starts), view_of(ends), run_length,
                      view_of(index_bases));
  of(indices).swap(call.args, indices.device().index());
}

void gather_partly_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                    at::IntArrayRef ends, at::IntArrayRef numbers, int64_t of, bool accumulate,
                    const at::Tensor& partial_sums, at::IntArrayRef first_partials, const OptionalAtTensor& found_inf,
                    int64_t run_length, const OptionalAtTensor& index_bases) {
  if (is_dispatched()) {
    using Signature = void(const at::Tensor&, Lists, const at::Tensor&, Numbers, Numbers, Numbers, int64_t, bool,
                           const at::Tensor&, Numbers, const OptionalAtTensor&, int64_t, const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::gather_partly_");
    return op.call(out, dense, indices, starts, ends, numbers, of, accumulate, partial_sums, first_partials, found_inf,
                   run_length, index_bases);
  }
  RECORD_FUNCTION("sparse_opt_native::gather_partly_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> list = views_of(dense);
  const TensorView sums = view_of(partial_sums);
  const GatherCall call(view_of(out), list, view_of(indices), view_of(starts), view_of(ends), std::nullopt, accumulate,
                        std::nullopt, view_of(found_inf), run_length, view_of(index_bases), of);
  check_partly(view_of(starts), view_of(ends), view_of(numbers), of, sums, view_of(first_partials));
  loaded->gather_partly(call.args, sums.as<float>(), first_partials.data(), numbers.data(), indices.device().index());
}

void tile_weight_grad_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                       const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                       bool accumulate, const at::Tensor& sum_sq, const OptionalAtTensor& found_inf) {
  if (is_dispatched()) {
    using Signature = void(const at::Tensor&, Lists, Lists, const at::Tensor&, Numbers, Numbers, int64_t,
                           const OptionalAtTensor&, bool, const OptionalAtTensor&, const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::tile_weight_grad_");
    return op.call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, std::nullopt, accumulate, sum_sq,
                   found_inf);
  }
  RECORD_FUNCTION("sparse_opt_native::tile_weight_grad_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> lefts = views_of(grad_outputs), rights = views_of(inputs);
  TileCall call(view_of(out), lefts, rights, view_of(tiles), view_of(starts), view_of(ends), tile_size, accumulate,
                view_of(found_inf));
  call.args.sum_sq = float_data("sum_sq", view_of(sum_sq), call.args.count, view_of(tiles).device);
  of(tiles).tiles(call.args, tiles.device().index());
}

void tile_weight_grad_partly_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                              const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                              bool accumulate, const at::Tensor& partial_sums, at::IntArrayRef first_partials,
                              const OptionalAtTensor& found_inf) {
  if (is_dispatched()) {
    using Signature = void(const at::Tensor&, Lists, Lists, const at::Tensor&, Numbers, Numbers, int64_t, bool,
                           const at::Tensor&, Numbers, const OptionalAtTensor&);
    static const auto op = dispatched<Signature>("sparse_opt_native::tile_weight_grad_partly_");
    return op.call(out, grad_outputs, inputs, tiles, starts, ends, tile_size, accumulate, partial_sums, first_partials,
                   found_inf);
  }
  RECORD_FUNCTION("sparse_opt_native::tile_weight_grad_partly_", c10::ArrayRef<const c10::IValue>());
  const std::vector<TensorView> lefts = views_of(grad_outputs), rights = views_of(inputs);
  const TensorView sums = view_of(partial_sums);
  const TileCall call(view_of(out), lefts, rights, view_of(tiles), view_of(starts), view_of(ends), tile_size,
                      accumulate, view_of(found_inf));
  call.check_partly(sums, view_of(first_partials));
  loaded->tiles_partly(call.args, sums.as<float>(), first_partials.data(), tiles.device().index());
}

void add_partial_sums_(const at::Tensor& sum_sq, const at::Tensor& partial_sums, at::IntArrayRef starts,
                       at::IntArrayRef ends) {
  if (is_dispatched()) {
    using Signature = void(const at::Tensor&, const at::Tensor&, Numbers, Numbers);
    static const auto op = dispatched<Signature>("sparse_opt_native::add_partial_sums_");
    return op.call(sum_sq, partial_sums, starts, ends);
  }
  RECORD_FUNCTION("sparse_opt_native::add_partial_sums_", c10::ArrayRef<const c10::IValue>());
  const TensorView partials = view_of(partial_sums);
  const SumCall call(view_of(sum_sq), partials, view_of(starts), view_of(ends));
  loaded->sum_partials(call.segments, partials.as<const float>(), call.sums, partial_sums.device().index());
}

void add_partial_sums_and_clip_(const at::Tensor& sum_sq, const at::Tensor& partial_sums, at::IntArrayRef starts,
                                at::IntArrayRef ends, const at::Tensor& clip, const at::Tensor& finished,
                                double max_norm) {
  if (is_dispatched()) {
    using Signature =
        void(const at::Tensor&, const at::Tensor&, Numbers, Numbers, const at::Tensor&, const at::Tensor&, double);
    static const auto op = dispatched<Signature>("sparse_opt_native::add_partial_sums_and_clip_");
    return op.call(sum_sq, partial_sums, starts, ends, clip, finished, max_norm);
  }
  RECORD_FUNCTION("sparse_opt_native::add_partial_sums_and_clip_", c10::ArrayRef<const c10::IValue>());
  const TensorView partials = view_of(partial_sums);
  const SumCall call(view_of(sum_sq), partials, view_of(starts), view_of(ends));
  const ClipArguments args = SumCall::clip(view_of(clip), view_of(finished), max_norm, partials.device);
  loaded->sum_partials_and_clip(call.segments, partials.as<const float>(), call.sums, args,
                                partial_sums.device().index());
}

}  // namespace sparse_opt::direct
