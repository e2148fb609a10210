#include "program/sequence.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "fusedconv/check.hpp"
#include "program/device_guard.hpp"

namespace fusedconv {

Sequence::Sequence(int device) : device_(device) {
  FUSEDCONV_CHECK(device >= 0, "device: got ", device);
}

void Sequence::add(std::shared_ptr<Program const> program, std::vector<Operand> pointers,
                   int64_t workspace) {
  FUSEDCONV_CHECK(program != nullptr, "program: got none");
  FUSEDCONV_CHECK(workspace >= 0, "workspace: got ", workspace);
  int const count = int(pointers.size());
  FUSEDCONV_CHECK(count <= Program::kMaxSlots, "pointers: got ", count);
  for (Operand const& each : pointers) slots_ = std::max(slots_, each.slot + 1);
  FUSEDCONV_CHECK(slots_ < kMostAddresses, "pointers: got slots up to ", slots_);
  entries_.push_back({std::move(program), std::move(pointers), workspace});
}

void Sequence::run(std::span<uintptr_t const> addresses, uintptr_t workspace,
                   uintptr_t stream) const {
  int const count = int(addresses.size());
  FUSEDCONV_CHECK(count >= slots_ && count < kMostAddresses, "addresses: got ", count, " for ",
                  slots_, " slots");
  DeviceGuard const guard(device_);
  std::array<uintptr_t, kMostAddresses> all;
  std::ranges::copy(addresses, all.begin());
  all[count] = workspace;
  RunContext const context{.pointers = addresses.data(), .workspace = workspace};
  replays_.run({all.data(), std::size_t(count) + 1}, reinterpret_cast<cudaStream_t>(stream),
               [&](cudaStream_t on) {
                 for (Entry const& entry : entries_) {
                   std::array<uintptr_t, Program::kMaxSlots> pointers;
                   std::ranges::transform(
                       entry.pointers, pointers.begin(),
                       [&](Operand const& operand) { return uintptr_t(context.at(operand)); });
                   entry.program->launch({pointers.data(), entry.pointers.size()},
                                         workspace + entry.workspace, on);
                 }
               });
}

}  // namespace fusedconv
