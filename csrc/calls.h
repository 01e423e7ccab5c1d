// The calls of all ops except steps (step_op.h): checked arguments for the launchers, and the lists that they point to.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"
#include "gather/gather.h"
#include "swap/swap.h"
#include "tiles/tiles.h"

namespace sparse_opt {

struct GatherCall {
  std::vector<void*> dense;
  GatherArguments args;

  // index_bases cover `of` segments; see checked_segments.
  GatherCall(const TensorView& out, TensorList dense_list, const TensorView& indices, Ints starts, Ints ends,
             const OptionalTensor& scale, bool accumulate, const OptionalTensor& sum_sq,
             const OptionalTensor& found_inf, int64_t run_length, const OptionalTensor& index_bases,
             std::optional<int64_t> of = std::nullopt) {
    const Device device = indices.device;
    dense = list_data("dense", dense_list, device);
    args.segments = checked_segments("dense", dense_list, dense, indices, starts, ends, run_length, index_bases, of);
    if (!dense_list.empty()) args.dense_dtype = dtype_of("dense[0]", dense_list[0]);
    check_flat("out", out, checked_slots(indices, run_length), device);
    args.out_dtype = dtype_of("out", out);
    args.out = out.data;
    args.scale = optional_float_data("scale", scale, 1, device);
    args.accumulate = accumulate;
    args.sum_sq = optional_float_data("sum_sq", sum_sq, static_cast<int64_t>(dense_list.size()), device);
    args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  }
};

// Where a call that gathers some tensors of a list of `of` writes its partial sums: see kernel_table.h.
inline void check_partly(Ints starts, Ints ends, Ints numbers, int64_t of, const TensorView& partial_sums,
                         Ints first_partials) {
  check_dtype("partial_sums", partial_sums, ScalarType::Float);
  SPARSE_OPT_CHECK(numbers.size() == starts.size() && first_partials.size() == starts.size(), "dense holds ",
                   starts.size(), " tensors, and there are ", numbers.size(), " numbers and ", first_partials.size(),
                   " first_partials");
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t blocks = gather_blocks(starts[i], ends[i]);
    SPARSE_OPT_CHECK(0 <= numbers[i] && numbers[i] < of, "numbers[", i, "] is ", numbers[i], ", expected less than ",
                     of);
    SPARSE_OPT_CHECK(0 <= first_partials[i] && first_partials[i] + blocks <= partial_sums.numel, "partial_sums has ",
                     partial_sums.numel, " elements, expected ", blocks, " from ", first_partials[i], " on");
  }
}

struct TileCall {
  std::vector<void*> grad_outputs, inputs;
  std::vector<int64_t> tokens, rows, columns;
  TileArguments args;

  TileCall(const TensorView& out, TensorList grad_output_list, TensorList input_list, const TensorView& tiles,
           Ints starts, Ints ends, int64_t tile_size, bool accumulate, const OptionalTensor& found_inf) {
    const Device device = tiles.device;
    const size_t n = grad_output_list.size();
    check_dtype("tiles", tiles, ScalarType::Long);
    SPARSE_OPT_CHECK(tiles.dim == 2 && tiles.size(1) == 4 && tiles.contiguous, "tiles has sizes ", tiles.sizes(),
                     ", expected contiguous [tiles, 4]");
    SPARSE_OPT_CHECK(tile_size == 64 || tile_size == 128, "tile_size is ", tile_size, ", expected 64 or 128");
    SPARSE_OPT_CHECK(input_list.size() == n && starts.size() == n && ends.size() == n, "grad_outputs holds ", n,
                     " tensors, inputs ", input_list.size(), ", and there are ", starts.size(), " starts and ",
                     ends.size(), " ends");
    grad_outputs = list_data("grad_outputs", grad_output_list, device);
    inputs = list_data("inputs", input_list, device);
    if (n > 0) {
      args.dtype = dtype_of("grad_outputs[0]", grad_output_list[0]);
      check_dtype("inputs[0]", input_list[0], grad_output_list[0].dtype);
    }
    for (size_t i = 0; i < n; ++i) {
      const TensorView &g = grad_output_list[i], &x = input_list[i];
      SPARSE_OPT_CHECK(
          g.dim >= 2 && x.dim >= 2 && std::ranges::equal(g.sizes().first(g.dim - 1), x.sizes().first(x.dim - 1)),
          "grad_outputs[", i, "] has sizes ", g.sizes(), " and inputs[", i, "] ", x.sizes(),
          ", expected the same but for the last");
      tokens.push_back(g.size(-1) > 0 ? g.numel / g.size(-1) : 0);
      rows.push_back(g.size(-1));
      columns.push_back(x.size(-1));
      SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= tiles.size(0), "matrix ", i,
                       " has the tiles [", starts[i], ", ", ends[i], "), expected within [0, ", tiles.size(0), ")");
    }
    args.count = static_cast<int64_t>(n);
    args.grad_outputs = grad_outputs.data();
    args.inputs = inputs.data();
    args.tokens = tokens.data();
    args.rows = rows.data();
    args.columns = columns.data();
    args.starts = starts.data();
    args.ends = ends.data();
    args.tiles = tiles.as<const int64_t>();
    args.tile_size = static_cast<int>(tile_size);
    check_flat("out", out, out.numel, device);
    args.out_dtype = dtype_of("out", out);
    args.out = out.data;
    args.accumulate = accumulate;
    args.found_inf = optional_float_data("found_inf", found_inf, 1, device);
  }

  void set_token_offsets(const OptionalTensor& offsets, Device device) {
    if (!offsets) return;
    check_dtype("token_offsets", *offsets, ScalarType::Int);
    check_flat("token_offsets", *offsets, offsets->numel, device);
    args.token_offsets = offsets->as<const int32_t>();
    args.experts = offsets->numel;
  }

  void check_partly(const TensorView& partial_sums, Ints first_partials) const {
    check_dtype("partial_sums", partial_sums, ScalarType::Float);
    SPARSE_OPT_CHECK(first_partials.size() == tokens.size(), "there are ", first_partials.size(),
                     " first_partials, expected ", tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int64_t active = args.ends[i] - args.starts[i];
      SPARSE_OPT_CHECK(0 <= first_partials[i] && first_partials[i] + active <= partial_sums.numel, "partial_sums has ",
                       partial_sums.numel, " elements, expected ", active, " from ", first_partials[i], " on");
    }
  }
};

struct MoveCall {
  std::vector<void*> dense;
  MoveArguments args;

  MoveCall(TensorList dense_list, const char* compact_name, const TensorView& compact, const TensorView& indices,
           Ints starts, Ints ends, int64_t run_length = 1, const OptionalTensor& index_bases = std::nullopt) {
    dense = list_data("dense", dense_list, indices.device);
    args.segments = checked_segments("dense", dense_list, dense, indices, starts, ends, run_length, index_bases);
    check_flat(compact_name, compact, checked_slots(indices, run_length), indices.device);
    if (!dense_list.empty()) check_dtype(compact_name, compact, dense_list[0].dtype);
    args.element_size = movable_size(compact_name, compact);
    args.compact = compact.data;
  }
};

struct ReplaceCall {
  std::vector<void*> dense;
  ReplaceArguments args;

  ReplaceCall(TensorList dense_list, const TensorView& before, const TensorView& after, const TensorView& indices,
              Ints starts, Ints ends, int64_t run_length, const OptionalTensor& index_bases) {
    dense = list_data("dense", dense_list, indices.device);
    args.segments = checked_segments("dense", dense_list, dense, indices, starts, ends, run_length, index_bases);
    if (!dense_list.empty()) args.dense_dtype = dtype_of("dense[0]", dense_list[0]);
    args.before_dtype = checked_dtype("before", before, dense_list, indices, run_length);
    args.after_dtype = checked_dtype("after", after, dense_list, indices, run_length);
    args.before = before.data;
    args.after = after.data;
  }

 private:
  static DType checked_dtype(const char* name, const TensorView& tensor, TensorList dense_list,
                             const TensorView& indices, int64_t run_length) {
    check_flat(name, tensor, checked_slots(indices, run_length), indices.device);
    if (!dense_list.empty() && tensor.dtype != ScalarType::Float) check_dtype(name, tensor, dense_list[0].dtype);
    return dtype_of(name, tensor);
  }
};

// The partial sums of the segments, one after the other. `result`, if given, receives the norm of all and the
// coefficient: fp32 [2]. `finished` is int32 [1], 0.
struct SumCall {
  Segments segments;
  float* sums;
  ClipArguments clip;

  SumCall(const TensorView& sum_sq, const TensorView& partial_sums, Ints starts, Ints ends,
          const OptionalTensor& result, const OptionalTensor& finished, double max_norm) {
    segments.count = static_cast<int64_t>(starts.size());
    segments.starts = starts.data();
    segments.ends = ends.data();
    sums = float_data("sum_sq", sum_sq, segments.count, partial_sums.device);
    if (!result.has_value()) return;
    SPARSE_OPT_CHECK(finished.has_value(), "finished is None, expected a tensor with clip");
    check_flat("finished", *finished, 1, partial_sums.device);
    check_dtype("finished", *finished, ScalarType::Int);
    float* results = float_data("clip", *result, 2, partial_sums.device);
    clip = {static_cast<float>(max_norm), results, results + 1, static_cast<uint32_t*>(finished->data)};
  }
};

}  // namespace sparse_opt
