// What becomes of a consumer's accumulators: bias, scale and shift, GroupNorm by statistics,
// normalisation of pixels, activation, and the output.
#pragma once

#include "conv/activate.hpp"
#include "conv/round_each.hpp"
#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/linear.hpp"
#include "conv/sm90/boxes/moments.hpp"
#include "conv/sm90/boxes/pixel_norm.hpp"
#include "conv/sm90/boxes/stores.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::boxes {

// Of which finish() expects that OwnColumns has left the values.
__device__ __forceinline__ Result first_result(Params const& p) {
  return p.saves ? Result::kSaved : Result::kOutput;
}

// The results of a slab. Loops keep the code there once. shared: the consumer's, where `values` are
// too unless they have a place of their own.
template <class Traits, Extra kExtra>
__device__ __forceinline__ void finish(Params const& p, Maps const& maps, Block const& block,
                                       Slab const& slab, Consumer const& self,
                                       OwnColumns<Traits, kExtra>& columns, Sums<Traits>& sums,
                                       unsigned char* shared, ColumnValues<Traits>& values) {
  auto const round = [&] {
#pragma unroll
    for (auto& instruction : sums) round_each<typename Traits::Element>(instruction);
  };
  auto const activate = [&] {
    dispatch_activation(p.activation, [&](auto form) {
      using Form = decltype(form);
      for_each_sum<Traits>(sums, [](float& sum) {
        sum = kExtra == Extra::kTakesMoments ? device::quick_value<Form>(sum)
                                             : last_activated<typename Traits::Element, Form>(sum);
      });
    });
  };
  if constexpr (kExtra == Extra::kTakesMoments) {
    if (p.is_linear) scale_and_shift<Traits>(self, values.linear, sums);
    // Once before what is stored is activated, once behind.
#pragma unroll 1
    for (bool activated = false;; activated = true) {
      bool const stores = p.stores && activated == p.activates_output;
      if (stores) round();  // moments are of what is stored, or computed from that
      if (activated) {
        finish_copies(self);
        leave_moments<Traits>(p, block, slab, self, sums, shared);
      }
      if (stores) store<Traits>(p, maps, Result::kOutput, block, slab, self, sums, shared);
      if (activated) return;
      activate();
    }
  } else {
#pragma unroll 1
    for (Result result = first_result(p);;) {
      if (p.is_linear) scale_and_shift<Traits>(self, values.linear, sums);
      if (result == Result::kSaved) {
        round();
      } else {
        if constexpr (kExtra == Extra::kNormalizesPixels && kRollsPixels<Traits>) {
          if (Traits::kColumns == p.segment) {
            return finish_pixels<Traits>(p, maps, block, slab, self, values.affine, sums, shared);
          }
        }
        if constexpr (kExtra == Extra::kNormalizesPixels) {
          normalize_pixels<Traits>(p, self, values.affine, sums);
        } else if (p.group.statistics != nullptr) {
          normalize_groups<Traits>(self, values, sums);
        }
        activate();
      }
      store<Traits>(p, maps, result, block, slab, self, sums, shared);
      if (result == Result::kOutput) return;
      result = Result::kOutput;
      columns.leave(p, block, slab, result, self,
                    Traits::kOwnValues ? values : ColumnValues<Traits>::in(shared));
    }
  }
}

}  // namespace fusedconv::conv::sm90::boxes
