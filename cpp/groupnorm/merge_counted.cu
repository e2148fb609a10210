#include "groupnorm/merge_counted.hpp"

#include "groupnorm/merge_parts.hpp"

namespace fusedconv::groupnorm {
namespace {

struct CountedParts {
  CountedPartial const* __restrict__ partials;
  int64_t slots, channels;

  __device__ __forceinline__ CountedPartial operator()(int64_t sample, int slot,
                                                       int channel) const {
    return partials[(sample * slots + slot) * channels + channel];
  }
};

}  // namespace

void merge_counted(char const* where, GroupNormProblem const& problem, int64_t slots,
                   CountedPartial const* partials, StatisticsTargets const& targets,
                   cudaStream_t stream) {
  merge_parts(where, problem, slots, CountedParts{partials, slots, problem.channels}, targets,
              stream);
}

}  // namespace fusedconv::groupnorm
