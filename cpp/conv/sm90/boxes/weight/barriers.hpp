// Barriers of the ring that a block's stages pass through.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/weight/schedule.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t transposed[kMostStages];  // of blocks that transpose
};
static_assert(sizeof(Barriers) <= Memory::kBarrierBytes);

}  // namespace fusedconv::conv::sm90::boxes::weight
