#include "program/program.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "fusedconv/check.hpp"
#include "fusedconv/types.hpp"
#include "program/device_guard.hpp"

namespace fusedconv {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

}  // namespace

Program::Program(int device, int64_t batch, int64_t batch_chunk)
    : device_(device),
      batch_(batch),
      batch_chunk_(batch_chunk == 0 ? batch : std::min(batch_chunk, batch)) {
  FUSEDCONV_CHECK(device >= 0, "device: got ", device);
  FUSEDCONV_CHECK(batch > 0, "batch: got ", batch);
  FUSEDCONV_CHECK(batch_chunk >= 0, "batch_chunk: got ", batch_chunk);
}

Operand Program::tensor(int slot, int64_t bytes_per_sample) const {
  FUSEDCONV_CHECK(slot >= 0 && slot < kMaxSlots, "slot: got ", slot);
  FUSEDCONV_CHECK(bytes_per_sample >= 0, "bytes_per_sample: got ", bytes_per_sample);
  return {slot, 0, bytes_per_sample};
}

Operand Program::scratch(int64_t bytes_per_sample, int64_t bytes) {
  FUSEDCONV_CHECK(bytes_per_sample >= 0, "bytes_per_sample: got ", bytes_per_sample);
  FUSEDCONV_CHECK(bytes >= 0, "bytes: got ", bytes);
  Operand const operand{Operand::kWorkspace, workspace_bytes_, 0};
  workspace_bytes_ += round_up(bytes_per_sample * batch_chunk_ + bytes, kWorkspaceAlignment);
  return operand;
}

void Program::before(std::shared_ptr<Step const> step) {
  before_.push_back(entry(std::move(step), batch_));
}

void Program::per_chunk(std::shared_ptr<Step const> step) {
  per_chunk_.push_back(entry(std::move(step), batch_chunk_));
}

void Program::after(std::shared_ptr<Step const> step) {
  after_.push_back(entry(std::move(step), batch_));
}

Program::Entry Program::entry(std::shared_ptr<Step const> step, int64_t samples) {
  FUSEDCONV_CHECK(step != nullptr, "step: got none");
  for (Operand const& operand : step->operands()) slots_ = std::max(slots_, operand.slot + 1);
  int64_t const bytes = step->workspace_bytes(samples);
  return {std::move(step), bytes > 0 ? scratch(0, bytes) : Operand{}};
}

std::vector<std::string> Program::steps() const {
  std::vector<std::string> result;
  for (Entry const& entry : before_) result.push_back(entry.step->describe());
  for (Entry const& entry : per_chunk_) {
    result.push_back(entry.step->describe());
    if (batch_chunk_ < batch_) {
      result.back() += detail::join(", for each ", batch_chunk_, " samples");
    }
  }
  for (Entry const& entry : after_) result.push_back(entry.step->describe());
  return result;
}

void Program::run(std::vector<Entry> const& entries, RunContext& context) {
  for (Entry const& entry : entries) {
    entry.step->run(context, context.at(entry.workspace));
    Leaves const leaves = entry.step->leaves(context);
    if (leaves != Leaves::kNothing) context.begins_early = leaves == Leaves::kReleases;
  }
}

void Program::run(std::span<uintptr_t const> pointers, uintptr_t workspace,
                  uintptr_t stream) const {
  check(pointers, workspace);
  DeviceGuard const guard(device_);
  std::array<uintptr_t, kMaxSlots + 1> addresses;
  std::ranges::copy(pointers, addresses.begin());
  addresses[pointers.size()] = workspace;
  replays_.run(
      {addresses.data(), pointers.size() + 1}, reinterpret_cast<cudaStream_t>(stream),
      [&](cudaStream_t on) { launch(pointers, workspace, on); }, [&] { return steps(); });
}

void Program::check(std::span<uintptr_t const> pointers, uintptr_t workspace) const {
  int const count = int(pointers.size());
  FUSEDCONV_CHECK(count >= slots_, "pointers: got ", count, " for ", slots_, " slots");
  FUSEDCONV_CHECK(count <= kMaxSlots, "pointers: got ", count);
  FUSEDCONV_CHECK(workspace != 0 || workspace_bytes_ == 0, "workspace: got none for ",
                  workspace_bytes_, " bytes");
  FUSEDCONV_CHECK(workspace % kWorkspaceAlignment == 0, "workspace: got address ", workspace);
}

bool Program::launch(std::span<uintptr_t const> pointers, uintptr_t workspace, cudaStream_t stream,
                     bool begins_early) const {
  RunContext context{.pointers = pointers.data(),
                     .workspace = workspace,
                     .first_sample = 0,
                     .samples = batch_,
                     .stream = stream,
                     .begins_early = begins_early};
  run(before_, context);
  for (int64_t first = 0; first < batch_; first += batch_chunk_) {
    context.first_sample = first;
    context.samples = std::min(batch_chunk_, batch_ - first);
    run(per_chunk_, context);
  }
  context.first_sample = 0;
  context.samples = batch_;
  run(after_, context);
  return context.begins_early;
}

}  // namespace fusedconv
