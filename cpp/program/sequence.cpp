#include "program/sequence.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "fusedconv/check.hpp"
#include "program/device_guard.hpp"

namespace fusedconv {

Sequence::Sequence(int device) : device_(device) {
  FUSEDCONV_CHECK(device >= 0, "device: got ", device);
}

void Sequence::add(std::shared_ptr<Program const> program, std::vector<Operand> pointers) {
  FUSEDCONV_CHECK(program != nullptr, "program: got none");
  int const count = int(pointers.size());
  FUSEDCONV_CHECK(count <= Program::kMaxSlots, "pointers: got ", count);
  for (Operand const& each : pointers) {
    FUSEDCONV_CHECK(each.slot >= Operand::kWorkspace && each.slot < kMostAddresses - 1,
                    "pointers: got slot ", each.slot);
    FUSEDCONV_CHECK(each.offset >= 0, "pointers: got offset ", each.offset);
    slots_ = std::max(slots_, each.slot + 1);
  }
  entries_.push_back({std::move(program), std::move(pointers)});
}

void Sequence::run(std::span<uintptr_t const> addresses, uintptr_t workspace,
                   uintptr_t stream) const {
  int const count = int(addresses.size());
  FUSEDCONV_CHECK(count >= slots_ && count < kMostAddresses, "addresses: got ", count, " for ",
                  slots_, " slots");
  RunContext const context{.pointers = addresses.data(), .workspace = workspace};
  // Calls body(program, its pointers) for each in turn.
  auto const for_each = [&](auto const& body) {
    for (Entry const& entry : entries_) {
      std::array<uintptr_t, Program::kMaxSlots> pointers;
      std::ranges::transform(entry.pointers, pointers.begin(), [&](Operand const& operand) {
        return uintptr_t(context.at(operand));
      });
      body(*entry.program, std::span<uintptr_t const>(pointers.data(), entry.pointers.size()));
    }
  };
  for_each([&](Program const& program, std::span<uintptr_t const> pointers) {
    program.check(pointers, workspace);
  });
  DeviceGuard const guard(device_);
  std::array<uintptr_t, kMostAddresses> all;
  std::ranges::copy(addresses, all.begin());
  all[count] = workspace;
  replays_.run(
      {all.data(), std::size_t(count) + 1}, reinterpret_cast<cudaStream_t>(stream),
      [&](cudaStream_t on) {
        bool early = false;
        for_each([&](Program const& program, std::span<uintptr_t const> pointers) {
          early = program.launch(pointers, workspace, on, early);
        });
      },
      [&] {
        std::vector<std::string> steps;
        for (Entry const& entry : entries_) {
          for (std::string& step : entry.program->steps()) steps.push_back(std::move(step));
        }
        return steps;
      });
}

}  // namespace fusedconv
