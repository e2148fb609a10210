// A step of a program: one pass over memory, built by the room that owns its kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fusedconv {

// Where a step finds a tensor: a pointer that the caller passes (slot) or a part of the workspace,
// and how far it lies on for each further sample of the batch.
struct Operand {
  static constexpr int kAbsent = -1;
  static constexpr int kWorkspace = -2;

  int slot = kAbsent;            // index into run()'s pointers, or one of the above
  int64_t offset = 0;            // bytes
  int64_t bytes_per_sample = 0;  // 0: the same for every batch chunk

  bool present() const { return slot != kAbsent; }
};

// What a step leaves for the next one's launch, which may begin beside one launch that releases
// early, if it waits for that where it reads what it wrote (cuda/early.hpp).
enum class Leaves : int {
  kAll,       // has to end first
  kReleases,  // its only launch, which waits for all in front, releases early
  kNothing,   // launches nothing
};

// What one launch of a step sees: the caller's pointers, and the samples it is about.
struct RunContext {
  uintptr_t const* pointers = nullptr;
  uintptr_t workspace = 0;
  int64_t first_sample = 0;
  int64_t samples = 0;
  cudaStream_t stream = nullptr;
  bool begins_early = false;  // may: the launch in front releases early

  // Null where the operand is absent or the caller passed 0 for it.
  template <class T = void>
  T* at(Operand const& operand) const {
    if (!operand.present()) return nullptr;
    uintptr_t const base = operand.slot == Operand::kWorkspace ? workspace : pointers[operand.slot];
    if (base == 0) return nullptr;
    return reinterpret_cast<T*>(base + operand.offset + operand.bytes_per_sample * first_sample);
  }
};

class Step {
 public:
  virtual ~Step() = default;

  // What the step does, in one line for a person.
  virtual std::string describe() const = 0;
  // Every operand that run() reads or writes.
  virtual std::vector<Operand> operands() const = 0;
  // Scratch that one launch over `samples` samples needs beside its operands.
  virtual int64_t workspace_bytes([[maybe_unused]] int64_t samples) const { return 0; }
  // Launches on context.stream; never synchronises, never allocates. `workspace` is aligned to 256
  // bytes, null where workspace_bytes() is 0.
  virtual void run(RunContext const& context, void* workspace) const = 0;
  // What run() leaves at these addresses.
  virtual Leaves leaves([[maybe_unused]] RunContext const& context) const { return Leaves::kAll; }
};

}  // namespace fusedconv
