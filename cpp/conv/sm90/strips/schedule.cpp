#include "conv/sm90/strips/schedule.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "conv/sm90/architecture.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::strips {
namespace {

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, Reach const& reach, Math math, Layout layout,
                     bool aligned, bool padded_lines, Device const& device) {
  if (Support const runs = supports_architecture(device); !runs) return refused(runs.reason);
  if (traits_of(math).element_bytes() != 2) return refused("the row is not of 16 bits");
  if (layout != Layout::kChannelsFirst) return refused("reads NCHW; the input is channels last");
  if (p.d != 1 || p.z != 1 || p.t != 1) return refused("serves planes; the problem has depth");
  if (p.r != kTaps || p.s != kTaps || p.dilation_h != 1 || p.dilation_w != 1) {
    return refused(detail::join("its filter is 3 x 3 neighbours, not ", p.r, " x ", p.s,
                                " with dilation ", p.dilation_h, " x ", p.dilation_w));
  }
  if (p.lower_padding_w != reach.before) {
    return refused(detail::join("reads ", reach.before, " columns before an output's, not ",
                                p.lower_padding_w));
  }
  if (p.c > kChannels) {
    return refused(detail::join("has ", p.c, " input channels, up to ", kChannels, " are served"));
  }
  if (!aligned) return refused("the input's address is no multiple of 16 bytes");
  if (!padded_lines && p.w % kGranule != 0) {
    return refused(
        detail::join("the input's lines are no multiples of 16 bytes: ", p.w, " times 2"));
  }
  if (p.q % kGranule != 0) {
    return refused(
        detail::join("the output's lines are no multiples of 16 bytes: ", p.q, " times 2"));
  }
  if (reach.shared_bytes() > device.shared_bytes) {
    return refused(detail::join("its ring takes ", reach.shared_bytes(), " bytes of the ",
                                device.shared_bytes, " of shared memory"));
  }
  Schedule s;
  s.strips = int(ceil_div(p.q, kPositions));
  s.blocks_n = int(ceil_div(p.k, kChannels));
  s.sets = std::max(1, device.multiprocessors / (s.strips * s.blocks_n));
  s.filter_bytes = int64_t(s.blocks_n) * kProducts * kChannels * kStepChannels * 2;
  s.shared_bytes = reach.shared_bytes();
  return s;
}

}  // namespace fusedconv::conv::sm90::strips
