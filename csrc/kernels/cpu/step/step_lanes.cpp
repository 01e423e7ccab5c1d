#include "step_lanes.h"

#include <stdexcept>
#include <type_traits>

#include "../common/multiversion.h"

// Clang has no such pragma as is used below.
#if defined(SPARSE_OPT_AVX512) && !defined(__clang__)
#define SPARSE_OPT_LANES
#include <immintrin.h>
#endif

namespace sparse_opt::cpu {

#ifdef SPARSE_OPT_LANES

bool takes_lanes(const StepArguments& args) {
  const bool in_fp32 = args.param_dtype == DType::kFloat32 && args.grad_dtype == DType::kFloat32 &&
                       args.moment_dtype == DType::kFloat32 && args.master == nullptr;
  return has_avx512() && in_fp32 && args.segments.run_length == 1 && args.segments.index_type != IndexType::kInt64;
}

// What is compiled for AVX-512 is local to this file: of a function that other files have too, the linker could take
// this one for machines without it. By features and not as an architecture, which an -march of the build would
// contradict: GCC inlines no intrinsic of one architecture into a function of another.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")
namespace {

constexpr int kLanes = 16;
// Slots ahead whose lines are asked for; with dense gradients every eighth slot's is asked for before that, for its
// page (blocks.h).
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

  // Before slots [k, k + kUnit), k a multiple of it: those up to kAnnounced later are there after this.
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

// update(g, p, m, v) for each slot. A state that the call lacks is null.
template <typename Update>
void step_lanes(const StepArguments& args, const Chunk& chunk, void* first_state, void* second_state, Update update) {
  const int64_t size = chunk.end - chunk.begin;
  float* dense = static_cast<float*>(args.segments.dense[chunk.segment]);
  const bool gathers = args.dense_grads != nullptr;
  const float* grad = gathers ? static_cast<const float*>(args.dense_grads[chunk.segment])
                              : static_cast<const float*>(args.grad) + chunk.begin;
  float* first = first_state != nullptr ? static_cast<float*>(first_state) + chunk.begin : nullptr;
  float* second = second_state != nullptr ? static_cast<float*>(second_state) + chunk.begin : nullptr;

  Positions positions(args.segments, chunk);
  // Inline: of a function that only prefetches GCC drops the call (blocks.h).
  const auto ask_for = [&]<int Every>(int64_t k, std::integral_constant<int, Every>) __attribute__((always_inline)) {
    if (k + kLanes > size) return;
    const int32_t* at = positions.at(k);
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; lane += Every) __builtin_prefetch(dense + at[lane], 0, 2);
    if (!gathers) return;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; lane += Every) __builtin_prefetch(grad + at[lane], 0, 2);
  };
  if (gathers) {
    for (int64_t k = 0; k < kAnnounced; k += kLanes) ask_for(k, kSome);
  }
  for (int64_t k = 0; k < kAhead; k += kLanes) ask_for(k, kAll);

  for (int64_t k = 0; k < size; k += kLanes) {
    if (k % Positions::kUnit == 0) positions.begin_unit(k);
    if (gathers) ask_for(k + kAnnounced, kSome);
    ask_for(k + kAhead, kAll);
    const auto lanes = static_cast<__mmask16>(size - k >= kLanes ? 0xffff : (1 << (size - k)) - 1);
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, positions.at(k));
    const __m512 zero = _mm512_setzero_ps();
    __m512 gradient =
        gathers ? _mm512_mask_i32gather_ps(zero, lanes, at, grad, 4) : _mm512_maskz_loadu_ps(lanes, grad + k);
    if (args.grad_scale != nullptr) gradient = _mm512_div_ps(gradient, _mm512_set1_ps(*args.grad_scale));
    if (args.clip_coef != nullptr) gradient = _mm512_mul_ps(gradient, _mm512_set1_ps(*args.clip_coef));
    alignas(64) float g[kLanes], p[kLanes], m[kLanes], v[kLanes];
    _mm512_store_ps(g, gradient);
    _mm512_store_ps(p, _mm512_mask_i32gather_ps(zero, lanes, at, dense, 4));
    _mm512_store_ps(m, first != nullptr ? _mm512_maskz_loadu_ps(lanes, first + k) : zero);
    _mm512_store_ps(v, second != nullptr ? _mm512_maskz_loadu_ps(lanes, second + k) : zero);
    for (int lane = 0; lane < kLanes; ++lane) update(g[lane], p[lane], m[lane], v[lane]);
    if (first != nullptr) _mm512_mask_storeu_ps(first + k, lanes, _mm512_load_ps(m));
    if (second != nullptr) _mm512_mask_storeu_ps(second + k, lanes, _mm512_load_ps(v));
    _mm512_mask_i32scatter_ps(dense, lanes, at, _mm512_load_ps(p), 4);
  }
}

}  // namespace

void adamw_lanes(const AdamWArguments& args, const Chunk& chunk, const AdamWScalars& scalars) {
  const AdamWScalars s = scalars;
  if (s.lerps_from_gradient()) {
    step_lanes(args, chunk, args.exp_avg, args.exp_avg_sq,
               [s](float g, float& p, float& m, float& v) { adamw_element(s, true, g, p, m, v); });
  } else {
    step_lanes(args, chunk, args.exp_avg, args.exp_avg_sq,
               [s](float g, float& p, float& m, float& v) { adamw_element(s, false, g, p, m, v); });
  }
}

void sgd_lanes(const SgdArguments& args, const Chunk& chunk, const SgdScalars& scalars) {
  const SgdScalars s = scalars;
  step_lanes(args, chunk, args.momentum_buffer, nullptr,
             [s](float g, float& p, float& b, float&) { sgd_element(s, g, p, b); });
}

#pragma GCC pop_options

#else

bool takes_lanes(const StepArguments&) {
  return false;
}

void adamw_lanes(const AdamWArguments&, const Chunk&, const AdamWScalars&) {
  throw std::logic_error("adamw_lanes: this build has no AVX-512");
}

void sgd_lanes(const SgdArguments&, const Chunk&, const SgdScalars&) {
  throw std::logic_error("sgd_lanes: this build has no AVX-512");
}

#endif

}  // namespace sparse_opt::cpu
