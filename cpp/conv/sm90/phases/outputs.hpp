// From sums to outputs and to moments.
//
// Of a warp's sixteen positions, two lines of eight, lane 4 r + t has position r of both lines, and
// of each phase the channels that channel_of() says: sum 4 j + 2 line + half of a phase is of its
// column 8 j + 2 t + half.
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
  static constexpr int kChannels = Traits::kChannels, kPhases = Traits::kPhases;
  static constexpr int kEights = Traits::kEights, kPhaseSums = Traits::kPhaseSums;
  static constexpr int kWhole = kChannels / 32;  // of which a lane has eight channels each
  static constexpr int kPairs = kEights / 2;
  // Of finish(), each for half of the phases: pairs of those along width.
  static constexpr int kPasses = 2, kPassPairs = kPhases / 2 / kPasses;
  static constexpr int kPassSums = 2 * kPassPairs * kPhaseSums;
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
  }

  // Maps, activates and stores a tile's sums, one half of the phases after the other by the same
  // instructions: those for all would be fetched more slowly than they are executed. The map takes
  // the other half's sums to where the first one's were, so that they are not moved besides.
  __device__ __forceinline__ void finish(Sums const& sums) const {
    float own[kPassSums];
    map<0>(sums, own);
#pragma unroll 1
    for (int pass = 0;;) {
      activate<T>(p_.activation, own);
#pragma unroll
      for (int pair = 0; pair < kPassPairs; ++pair) store(own, pass, pair);
      if (++pass == kPasses) break;
      map<1>(sums, own);
    }
  }

  // Where a tile lies, for what follows.
  __device__ __forceinline__ void place(int sample, Origin const& origin) {
    int const d = kStride * origin.d, w = kStride * (origin.w + lane_ / 4);
    int const h = kStride * (origin.h + thread_ / 32 * 2);
    bool const whole = d + 1 < p_.outputs[0] + (Traits::kShape.axes < kMaxAxes) &&
                       kStride * (origin.h + kEdge) <= p_.outputs[1] &&
                       kStride * (origin.w + kEdge) <= p_.outputs[2];
    within_ = kAll;
    if (!whole) {
      within_ = 0;
#pragma unroll
      for (int line = 0; line < 2; ++line) {
#pragma unroll
        for (int phase = 0; phase < kPhases; ++phase) {
          bool const present = d + has(phase, kDepth) < p_.outputs[0] &&
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

  // Of a tile's values; the first value of each channel in the part is its pivot.
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
  // The map of a pass's sums. Of a lane's channels four at a time, neighbours in sixteen columns,
  // and what maps the next four is asked for meanwhile.
  template <int kPass>
  __device__ __forceinline__ void map(Sums const& sums, float (&own)[kPassSums]) const {
    uint32_t const scale = device::shared_address(values_.scale);
    uint32_t const shift = device::shared_address(values_.shift);
    float4 scales[2], shifts[2];
    auto const load = [&](int two) {
      uint32_t const at = own_channel(2 * two) * uint32_t(sizeof(float));
      scales[two % 2] = device::load_quad(scale + at);
      shifts[two % 2] = device::load_quad(shift + at);
    };
    load(0);
#pragma unroll
    for (int two = 0; two < kPairs; ++two) {
      if (two + 1 < kPairs) load(two + 1);
      float4 const &a = scales[two % 2], &b = shifts[two % 2];
#pragma unroll
      for (int phase = 0; phase < 2 * kPassPairs; ++phase) {
#pragma unroll
        for (int line = 0; line < 2; ++line) {
          int const first = index(phase, 2 * two, line), next = index(phase, 2 * two + 1, line);
          float const* const from = sums + kPass * kPassSums;
          own[first] = fmaf(from[first], a.x, b.x);
          own[first + 1] = fmaf(from[first + 1], a.y, b.y);
          own[next] = fmaf(from[next], a.z, b.z);
          own[next + 1] = fmaf(from[next + 1], a.w, b.w);
        }
      }
    }
  }

  // Two phases that are neighbours along width. A lane's channels are whole 16 bytes, or half of
  // them of those that are left.
  __device__ __forceinline__ void store(float const (&own)[kPassSums], int pass, int pair) const {
    int64_t const line_elements = int64_t(p_.outputs[2]) * p_.output_channels;
    int64_t const plane_elements = line_elements * p_.outputs[1];
    int const even = 2 * (pass * kPassPairs + pair);
    T* const first =
        output_ + ((even & kDepth ? plane_elements : 0) + (even & kHeight ? line_elements : 0));
#pragma unroll
    for (int line = 0; line < 2; ++line) {
#pragma unroll
      for (int ahead = 0; ahead < 2; ++ahead) {
        T* const pixel = first + (kStride * line * line_elements + ahead * p_.output_channels);
        uint32_t const bit = 1u << (line * kPhases + 2 * pair + ahead);
        auto const present = [&](int block) {
          return stored_[block] >> 2 * kPassPairs * pass & bit;
        };
        auto const packed = [&](int j) {
          int const i = index(2 * pair + ahead, j, line);
          return device::Pack<T, 2>::of({own[i], own[i + 1]}).bits[0];
        };
#pragma unroll
        for (int block = 0; block < kWhole; ++block) {
          int const j = block * 4;
          store_vector(pixel + block * 32,
                       uint4{packed(j), packed(j + 1), packed(j + 2), packed(j + 3)},
                       present(block));
        }
        if constexpr (kHalf) {
          int const j = kEights - 2;
          store_vector(pixel + (kWhole * 32 - lane_ % 4 * (kVector / 2)),
                       uint2{packed(j), packed(j + 1)}, present(kWhole));
        }
      }
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
      float2 const pivot = pair_of(values_.pivot, j);
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
  int count_ = 0;            // of values, of moments
  float totals_[kPairs][8];  // of each four channels their sums, then sums of squares
};

}  // namespace fusedconv::conv::sm90::phases
