// Programs one after another, run by one call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "program/program.hpp"
#include "program/replays.hpp"

namespace fusedconv {

// Each program's tensors are addresses that the caller passes or parts of one workspace, so that
// what a program leaves for the next needs no tensor.
class Sequence {
 public:
  static constexpr int kMostAddresses = 64;

  explicit Sequence(int device);

  // pointers: of the program's slots, where each is found among the caller's addresses or in the
  // workspace, at whose beginning the program's own lies.
  void add(std::shared_ptr<Program const> program, std::vector<Operand> pointers);

  // As Program::run(). Where the same addresses come again, all launches are one.
  void run(std::span<uintptr_t const> addresses, uintptr_t workspace, uintptr_t stream) const;

  int graphs() const { return replays_.graphs(); }

 private:
  struct Entry {
    std::shared_ptr<Program const> program;
    std::vector<Operand> pointers;
  };

  int device_;
  int slots_ = 0;
  std::vector<Entry> entries_;
  mutable Replays replays_;
};

}  // namespace fusedconv
