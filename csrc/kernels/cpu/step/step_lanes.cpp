#include "step_lanes.h"

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../common/multiversion.h"
#include "generated/rules.h"

// Clang does not have the target pragma below.
#if defined(SPARSE_OPT_AVX512) && !defined(__clang__)
#define SPARSE_OPT_LANES
#include <immintrin.h>
#endif

namespace sparse_opt::cpu {

#ifdef SPARSE_OPT_LANES

bool runs_in_lanes(const StepArguments& args) {
  const bool in_fp32 = args.param_dtype == DType::kFloat32 && args.grad_dtype == DType::kFloat32 &&
                       args.state_dtype == DType::kFloat32 && args.master == nullptr && args.weights == nullptr;
  return has_avx512() && in_fp32 && args.segments.run_length == 1 && args.segments.index_type != IndexType::kInt64;
}

// Code for AVX-512 is local to this file: if other files had the same function, the linker could keep this version for
// machines without AVX-512, too. The pragma names features, not an architecture, which could contradict an -march of
// the build: GCC inlines no intrinsic of one architecture into a function of another.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")
namespace {

constexpr int kLanes = 16;
// Lines are prefetched so many slots ahead; with dense gradients that of every eighth slot is prefetched earlier, for
// the address translation of its page (blocks.h).
constexpr int64_t kAhead = 256, kAnnounced = 512;
constexpr std::integral_constant<int, 1> kAll;
constexpr std::integral_constant<int, 8> kSome;

// The positions of a chunk's slots, counted from its first.
class Positions {
 public:
  static constexpr int64_t kUnit = 256;

  Positions(const Segments& segments, const Chunk& chunk)
      : segments_(segments), chunk_(chunk), narrow_(segments.index_type == IndexType::kOffset16) {
    for (int64_t k = 0; k < kAnnounced; k += kUnit) widen_unit(k);
  }

  // Call before slots [k, k + kUnit), k a multiple of kUnit: makes the positions up to kAnnounced later available.
  void begin_unit(int64_t k) { widen_unit(k + kAnnounced); }

  const int32_t* at(int64_t k) const {
    return narrow_ ? ring_ + k % kRing : static_cast<const int32_t*>(segments_.indices) + chunk_.begin + k;
  }

 private:
  static constexpr int64_t kRing = 1024;
  static_assert(kAnnounced % kUnit == 0 && kAnnounced + kUnit <= kRing);

  void widen_unit(int64_t k) {
    const int64_t size = chunk_.end - chunk_.begin - k;
    if (!narrow_ || size <= 0) return;
    widen(segments_, chunk_.segment, chunk_.begin + k, size < kUnit ? size : kUnit, ring_ + k % kRing);
  }

  const Segments& segments_;
  const Chunk& chunk_;
  const bool narrow_;
  alignas(64) int32_t ring_[kRing];
};

// kBranch is Rule::branch(call), as a constant.
template <typename Rule, bool kBranch, size_t... I>
void step_lanes(const StepArguments& args, const Chunk& chunk, const typename Rule::CallScalars& call_scalars,
                const typename Rule::TensorScalars& tensor_scalars, std::index_sequence<I...>) {
  const auto call = call_scalars;
  const auto tensor = tensor_scalars;
  const int64_t size = chunk.end - chunk.begin;
  float* dense = static_cast<float*>(args.segments.dense[chunk.segment]);
  const bool gathers = args.dense_grads != nullptr;
  const float* grad = gathers ? static_cast<const float*>(args.dense_grads[chunk.segment])
                              : static_cast<const float*>(args.grad) + chunk.begin;
  float* const states[] = {args.states[I] != nullptr ? static_cast<float*>(args.states[I]) + chunk.begin : nullptr...};

  Positions positions(args.segments, chunk);
  // Always inline: GCC drops the call of a function that only prefetches (blocks.h).
  const auto prefetch = [&]<int Every>(int64_t k, std::integral_constant<int, Every>) __attribute__((always_inline)) {
    if (k + kLanes > size) return;
    const int32_t* at = positions.at(k);
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; lane += Every) __builtin_prefetch(dense + at[lane], 0, 2);
    if (!gathers) return;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; lane += Every) __builtin_prefetch(grad + at[lane], 0, 2);
  };
  if (gathers) {
    for (int64_t k = 0; k < kAnnounced; k += kLanes) prefetch(k, kSome);
  }
  for (int64_t k = 0; k < kAhead; k += kLanes) prefetch(k, kAll);

  for (int64_t k = 0; k < size; k += kLanes) {
    if (k % Positions::kUnit == 0) positions.begin_unit(k);
    if (gathers) prefetch(k + kAnnounced, kSome);
    prefetch(k + kAhead, kAll);
    const auto lanes = static_cast<__mmask16>(size - k >= kLanes ? 0xffff : (1 << (size - k)) - 1);
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, positions.at(k));
    const __m512 zero = _mm512_setzero_ps();
    __m512 gradient =
        gathers ? _mm512_mask_i32gather_ps(zero, lanes, at, grad, 4) : _mm512_maskz_loadu_ps(lanes, grad + k);
    if (args.grad_scale != nullptr) gradient = _mm512_div_ps(gradient, _mm512_set1_ps(*args.grad_scale));
    if (args.clip_coef != nullptr) gradient = _mm512_mul_ps(gradient, _mm512_set1_ps(*args.clip_coef));
    alignas(64) float g[kLanes], p[kLanes], held[sizeof...(I)][kLanes];
    _mm512_store_ps(g, gradient);
    _mm512_store_ps(p, _mm512_mask_i32gather_ps(zero, lanes, at, dense, 4));
    (_mm512_store_ps(held[I], states[I] != nullptr ? _mm512_maskz_loadu_ps(lanes, states[I] + k) : zero), ...);
    for (int lane = 0; lane < kLanes; ++lane) Rule::update(call, tensor, kBranch, g[lane], p[lane], held[I][lane]...);
    ((states[I] != nullptr ? _mm512_mask_storeu_ps(states[I] + k, lanes, _mm512_load_ps(held[I])) : void()), ...);
    _mm512_mask_i32scatter_ps(dense, lanes, at, _mm512_load_ps(p), 4);
  }
}

}  // namespace

template <typename Rule>
void step_in_lanes(const StepArguments& args, const Chunk& chunk, const typename Rule::CallScalars& call,
                   const typename Rule::TensorScalars& tensor) {
  constexpr auto kStates = std::make_index_sequence<kStateCount<Rule>>();
  if (Rule::branch(call)) {
    step_lanes<Rule, true>(args, chunk, call, tensor, kStates);
  } else {
    step_lanes<Rule, false>(args, chunk, call, tensor, kStates);
  }
}

#pragma GCC pop_options

#else

bool runs_in_lanes(const StepArguments&) {
  return false;
}

template <typename Rule>
void step_in_lanes(const StepArguments&, const Chunk&, const typename Rule::CallScalars&,
                   const typename Rule::TensorScalars&) {
  throw std::logic_error("step_in_lanes: this build has no AVX-512");
}

#endif

#define SPARSE_OPT_INSTANTIATE(Rule)                                                              \
  template void step_in_lanes<Rule>(const StepArguments&, const Chunk&, const Rule::CallScalars&, \
                                    const Rule::TensorScalars&);
SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_INSTANTIATE)

}  // namespace sparse_opt::cpu
