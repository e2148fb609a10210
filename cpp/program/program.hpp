// A program: the steps of a plan with their operands resolved, run by one call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "program/replays.hpp"
#include "program/step.hpp"

namespace fusedconv {

// Steps run in the order in which they were added: those before the first batch chunk (packing a
// filter) once, those per chunk in turn for each, which bounds the scratch between them, and those
// after the last chunk once. Steps before and after see the whole batch.
class Program {
 public:
  static constexpr int kMaxSlots = 32;

  // batch_chunk: the samples that one pass over the steps takes; 0 takes the whole batch.
  Program(int device, int64_t batch, int64_t batch_chunk);

  // A tensor that the caller passes. bytes_per_sample is 0 for what all samples share.
  Operand tensor(int slot, int64_t bytes_per_sample) const;
  // Scratch of one batch chunk: bytes for each of its samples, and bytes for the chunk as a whole.
  Operand scratch(int64_t bytes_per_sample, int64_t bytes);

  void before(std::shared_ptr<Step const> step);
  void per_chunk(std::shared_ptr<Step const> step);
  void after(std::shared_ptr<Step const> step);

  // Each step in one line, in the order of running.
  std::vector<std::string> steps() const;

  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t batch_chunk() const { return batch_chunk_; }

  // Launches everything on the stream of the program's device, which is current only meanwhile;
  // never synchronises, never allocates memory of the device but for graphs. `workspace` is aligned
  // to 256 bytes. Where the same addresses come again, all launches are one.
  void run(std::span<uintptr_t const> pointers, uintptr_t workspace, uintptr_t stream) const;
  // Throws InvalidArgument where run() does not take these.
  void check(std::span<uintptr_t const> pointers, uintptr_t workspace) const;
  // What run() does with those that check() takes, on the current device, launch by launch.
  // begins_early: whether the first launch may, as what is in front releases early; returns whether
  // the next one behind may.
  bool launch(std::span<uintptr_t const> pointers, uintptr_t workspace, cudaStream_t stream,
              bool begins_early = false) const;

  int graphs() const { return replays_.graphs(); }

 private:
  // A step and where its own scratch lies.
  struct Entry {
    std::shared_ptr<Step const> step;
    Operand workspace;
  };

  Entry entry(std::shared_ptr<Step const> step, int64_t samples);
  static void run(std::vector<Entry> const& entries, RunContext& context);

  int device_;
  int64_t batch_;
  int64_t batch_chunk_;
  int64_t workspace_bytes_ = 0;
  int slots_ = 0;
  std::vector<Entry> before_;
  std::vector<Entry> per_chunk_;
  std::vector<Entry> after_;
  mutable Replays replays_;
};

}  // namespace fusedconv
