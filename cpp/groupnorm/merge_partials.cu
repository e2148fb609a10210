#include "groupnorm/merge_partials.hpp"

#include "groupnorm/merge_partials_device.hpp"

namespace fusedconv::groupnorm {
namespace {

struct CountedParts {
  Partial const* __restrict__ base;
  int64_t slots, row_channels;

  __device__ __forceinline__ Partial operator()(int sample, int slot, int channel) const {
    return base[(sample * slots + slot) * row_channels + channel];
  }
};

}  // namespace

void merge_partials(std::string const& where, GroupNormProblem const& problem,
                    Partials const& partials, StatisticsTargets const& targets,
                    cudaStream_t stream) {
  launch_merge_partials(where, problem, partials.slots,
                        CountedParts{partials.base, partials.slots, partials.row_channels}, targets,
                        stream);
}

}  // namespace fusedconv::groupnorm
