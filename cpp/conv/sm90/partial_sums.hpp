// Accumulators on their way to partial sums in memory.
#pragma once

namespace fusedconv::conv::sm90 {

// Leaves four of a thread's accumulators where nothing was, or adds them to what it has left there.
__device__ __forceinline__ void leave_sums(float4* target, float4 four, bool first) {
  if (first) {
    *target = four;
  } else {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target),
                 "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
                 : "memory");
  }
}

}  // namespace fusedconv::conv::sm90
