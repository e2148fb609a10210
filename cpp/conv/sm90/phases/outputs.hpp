// From sums to outputs and to moments.
//
// Of a warp's sixteen positions, two lines of eight, lane 4 r + t has position r of both lines, and
// of each phase of a plane the channels that channel_of() says: sum 4 j + 2 line + half of a phase
// is of its column 8 j + 2 t + half.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/sm90/phases/params.hpp"
#include "conv/sm90/phases/traits.hpp"
#include "conv/sm90/phases/values.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cuda/math.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::phases {

template <class Traits>
class Outputs {
  using T = typename Traits::Element;
  static constexpr int kChannels = Traits::kChannels, kConsumers = Traits::kConsumers;
  static constexpr int kEights = Traits::kEights, kPhaseSums = Traits::kPhaseSums;
  static constexpr int kWhole = kChannels / 32;  // of which a lane has eight channels each
  static constexpr int kPairs = kEights / 2;
  static constexpr bool kHalf = kChannels % 32 != 0;
  static constexpr int kBlocks = kWhole + kHalf;
  static constexpr uint32_t kAll = (1u << 2 * kPhases) - 1;

 public:
  using Sums = float[Traits::kSums];

  __device__ __forceinline__ Outputs(Params const& p, Values<kChannels>& values, int self)
      : p_(p),
        values_(values),
        self_(self),
        thread_(int(threadIdx.x) % kWarpgroup),
        lane_(int(threadIdx.x) % 32),
        first_channel_(int(blockIdx.x) % p.channel_blocks * kChannels) {
    // Else they are asked for anew wherever they are needed.
    asm volatile("" : "+r"(thread_), "+r"(lane_));
    if (thread_ < kChannels) {
      int const channel = first_channel_ + thread_;
      bool const present = p.bias != nullptr && channel < p.own_channels;
      values_.bias[thread_] =
          present ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f;
    }
  }

  // What a sample's values are mapped by; all of one launch by the same where there are no
  // statistics.
  __device__ __forceinline__ void set_affine(int sample) {
    if (sample == sample_) return;
    bool const first = sample_ < 0;
    sample_ = sample;
    if (!first && p_.affine.statistics == nullptr) return;
    if (!first) sync();
    if (thread_ < kChannels) {
      int const channel = first_channel_ + thread_;
      groupnorm::ChannelAffine own;
      device::wait_for_launch_in_front();
      if (p_.affine.statistics != nullptr) {
        own = groupnorm::ChannelAffine::of(p_.affine, sample, channel);
      } else if (channel < p_.own_channels) {
        if (p_.scale != nullptr) own.scale = p_.scale[channel];
        if (p_.shift != nullptr) own.shift = p_.shift[channel];
      }
      // The bias is taken off the mean first, so that a large one costs no precision.
      float const mean = own.mean - values_.bias[thread_];
      values_.scale[thread_] = own.scale;
      values_.shift[thread_] = fmaf(-mean, own.scale, own.shift);
    }
    sync();
    // Kept in registers: products of others keep shared memory busy.
    uint32_t const scale = device::shared_address(values_.scale);
    uint32_t const shift = device::shared_address(values_.shift);
#pragma unroll
    for (int two = 0; two < kPairs; ++two) {
      uint32_t const at = uint32_t(own_channel(2 * two)) * uint32_t(sizeof(float));
      scales_[two] = device::load_quad(scale + at);
      shifts_[two] = device::load_quad(shift + at);
    }
  }

  // Maps, activates and stores a plane's sums. The activation is chosen around all of it, so that
  // stores are spread among the arithmetic.
  __device__ __forceinline__ void finish(Sums const& sums) const {
    dispatch_activation(p_.activation, [&](auto form) { finish_by<decltype(form)>(sums); });
  }

  // Where a plane of a tile lies, for what follows.
  __device__ __forceinline__ void place(int sample, Origin const& origin, int plane) {
    int const d = kStride * origin.d + plane, w = kStride * (origin.w + lane_ / 4);
    int const h = kStride * (origin.h + thread_ / 32 * 2);
    bool const whole = d < p_.outputs[0] && kStride * (origin.h + kEdge) <= p_.outputs[1] &&
                       kStride * (origin.w + kEdge) <= p_.outputs[2];
    within_ = kAll;
    if (!whole) {
      within_ = 0;
#pragma unroll
      for (int line = 0; line < 2; ++line) {
#pragma unroll
        for (int phase = 0; phase < kPhases; ++phase) {
          bool const present = d < p_.outputs[0] &&
                               h + kStride * line + has(phase, kHeight) < p_.outputs[1] &&
                               w + has(phase, kWidth) < p_.outputs[2];
          within_ |= uint32_t(present) << (line * kPhases + phase);
        }
      }
    }
    int64_t const pixel =
        ((int64_t(sample) * p_.outputs[0] + d) * p_.outputs[1] + h) * p_.outputs[2] + w;
    output_ = static_cast<T*>(p_.output) + pixel * p_.output_channels + first_channel_ +
              lane_ % 4 * kVector;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      int const ahead = block < kWhole ? lane_ % 4 * kVector : lane_ % 4 * kVector / 2;
      bool const present = first_channel_ + block * 32 + ahead < p_.output_channels;
      stored_[block] = present ? within_ : 0;
    }
  }

  // ---- moments of a part ----

  __device__ __forceinline__ void begin_moments() {
    count_ = 0;
#pragma unroll
    for (auto& own : totals_) {
#pragma unroll
      for (float& total : own) total = 0.0f;
    }
  }

  // Of a plane's values; the first value of each channel in the part is its pivot.
  __device__ __forceinline__ void add_moments(Sums const& sums, bool first) {
    if (first) {
      if (thread_ < 4) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          int const channel = own_channel(j);
          float const x = sums[index(0, j, 0)], y = sums[index(0, j, 0) + 1];
          values_.pivot[channel] = isfinite(x) ? x : 0.0f;
          values_.pivot[channel + 1] = isfinite(y) ? y : 0.0f;
        }
      }
      sync();
#pragma unroll
      for (int j = 0; j < kEights; ++j) pivots_[j] = pair_of(values_.pivot, j);
    }
    if (__all_sync(~0u, within_ == kAll)) {
      add<true>(sums);
    } else {
      add<false>(sums);
    }
    count_ += __popc(within_);
  }

  // Sums and sums of squares of each four channels, eight in all, are added up over the eight lanes
  // that have them, which keep one each.
  __device__ __forceinline__ void leave_moments(int sample, int part, int which) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
      bool const upper = lane_ / 4 & half;
#pragma unroll
      for (auto& own : totals_) {
#pragma unroll
        for (int i = 0; i < half; ++i) {
          float const given = upper ? own[i] : own[i + half];
          float const kept = upper ? own[i + half] : own[i];
          own[i] = kept + __shfl_xor_sync(~0u, given, half * 4);
        }
      }
    }
    // Of lanes 4 r + t: r / 4 is whether squares, r / 2 % 2 which eight, r % 2 which channel.
    int const warp = thread_ / 32;
    float* const to = lane_ >> 4 ? values_.squares[warp] : values_.sums[warp];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      to[own_channel(pair * 2 + (lane_ >> 3 & 1)) + (lane_ >> 2 & 1)] = totals_[pair][0];
    }
    int const count = __reduce_add_sync(~0u, lane_ % 4 == 0 ? count_ : 0);
    if (lane_ == 0) values_.counts[warp] = float(count);
    sync();
    if (thread_ < kChannels && first_channel_ + thread_ < p_.output_channels) {
      float total = 0.0f, squares = 0.0f, count = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        total += values_.sums[warp][thread_];
        squares += values_.squares[warp][thread_];
        count += values_.counts[warp];
      }
      device::Moments own;
      if (count > 0.0f) {
        own = device::shifted_moments(count, values_.pivot[thread_], total, squares);
        // The bias behind: what it is rounded by goes to the low part.
        float2 const mean = device::two_sum(own.mean, values_.bias[thread_]);
        own.mean = mean.x;
        own.low += mean.y;
      }
      int64_t const slot = (int64_t(sample) * p_.parts.divisor + part) * kConsumers + which;
      p_.partials[slot * p_.output_channels + first_channel_ + thread_] = own.partial();
    }
    sync();
  }

 private:
  __device__ __forceinline__ void sync() const {
    device::sync_threads(1 + kConsumers + self_, kWarpgroup);
  }
  __device__ __forceinline__ static constexpr bool has(int bits, int bit) { return bits & bit; }
  __device__ __forceinline__ static constexpr int index(int phase, int j, int line) {
    return phase * kPhaseSums + j * 4 + line * 2;
  }
  // The first of a lane's two channels of eight columns.
  __device__ __forceinline__ int own_channel(int eight) const {
    int const t = lane_ % 4;
    return eight < kWhole * 4 ? eight / 4 * 32 + t * 8 + eight % 4 * 2
                              : kWhole * 32 + t * 4 + eight % 4 * 2;
  }
  __device__ __forceinline__ float2 pair_of(float const (&values)[kChannels], int j) const {
    return *reinterpret_cast<float2 const*>(values + own_channel(j));
  }
  __device__ __forceinline__ bool within(int phase, int line) const {
    return within_ >> (line * kPhases + phase) & 1;
  }
  template <class Form>
  __device__ __forceinline__ void finish_by(Sums const& sums) const {
    int64_t const line_elements = int64_t(p_.outputs[2]) * p_.output_channels;
#pragma unroll
    for (int line = 0; line < 2; ++line) {
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
        int const y = kStride * line + has(phase, kHeight), x = has(phase, kWidth);
        store<Form>(sums, phase, line, output_ + (y * line_elements + x * p_.output_channels));
      }
    }
  }

  // Two neighbouring channels of a pixel, mapped, activated and rounded.
  template <class Form>
  __device__ __forceinline__ uint32_t finished(Sums const& sums, int phase, int j, int line) const {
    float4 const &a = scales_[j / 2], &b = shifts_[j / 2];
    float const* const from = sums + index(phase, j, line);
    bool const second = j % 2;
    float const x = fmaf(from[0], second ? a.z : a.x, second ? b.z : b.x);
    float const y = fmaf(from[1], second ? a.w : a.y, second ? b.w : b.y);
    return device::from_pair<T>(last_activated<T, Form>(x), last_activated<T, Form>(y));
  }

  // A lane's channels of a pixel: whole 16 bytes, or half of them of those that are left.
  template <class Form>
  __device__ __forceinline__ void store(Sums const& sums, int phase, int line, T* pixel) const {
    uint32_t const bit = 1u << (line * kPhases + phase);
    auto const two = [&](int j) { return finished<Form>(sums, phase, j, line); };
#pragma unroll
    for (int block = 0; block < kWhole; ++block) {
      int const j = block * 4;
      store_vector(pixel + block * 32, uint4{two(j), two(j + 1), two(j + 2), two(j + 3)},
                   stored_[block] & bit);
    }
    if constexpr (kHalf) {
      int const j = kEights - 2;
      store_vector(pixel + (kWhole * 32 - lane_ % 4 * (kVector / 2)), uint2{two(j), two(j + 1)},
                   stored_[kWhole] & bit);
    }
  }

  // Else the compiler makes some of them stores of four bytes, and jumps over each.
  __device__ __forceinline__ static void store_vector(T* target, uint4 const& v, uint32_t present) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(target),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(present)
        : "memory");
  }
  __device__ __forceinline__ static void store_vector(T* target, uint2 const& v, uint32_t present) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "@p st.global.v2.b32 [%0], {%1, %2};\n"
        "}" ::"l"(target),
        "r"(v.x), "r"(v.y), "r"(present)
        : "memory");
  }
  // Sums and sums of squares about the pivots.
  template <bool kAllWithin>
  __device__ __forceinline__ void add(Sums const& sums) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float2 const& pivot = pivots_[j];
      int const side = j % 2 * 2;
      float (&own)[8] = totals_[j / 2];
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
        for (int line = 0; line < 2; ++line) {
          float x = sums[index(phase, j, line)] - pivot.x;
          float y = sums[index(phase, j, line) + 1] - pivot.y;
          if (!kAllWithin && !within(phase, line)) x = y = 0.0f;
          own[side] += x;
          own[side + 1] += y;
          own[4 + side] = fmaf(x, x, own[4 + side]);
          own[4 + side + 1] = fmaf(y, y, own[4 + side + 1]);
        }
      }
    }
  }

  Params const& p_;
  Values<kChannels>& values_;
  int self_, thread_, lane_;
  int first_channel_;
  int sample_ = -1;
  uint32_t within_ = 0;       // bits of lines and phases
  uint32_t stored_[kBlocks];  // the same of those that have channels
  T* output_ = nullptr;
  float4 scales_[kPairs], shifts_[kPairs];  // of each four channels of the lane
  int count_ = 0;                           // of values, of moments
  float2 pivots_[kEights];                  // of the lane's channels
  float totals_[kPairs][8];  // of each four channels their sums, then sums of squares
};

}  // namespace fusedconv::conv::sm90::phases
