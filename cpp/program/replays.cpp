#include "program/replays.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "fusedconv/check.hpp"

namespace fusedconv {
namespace {

// Addresses that came once, of which a second time is noticed.
constexpr std::size_t kRemembered = 64;
// Graphs of a process: each takes some memory of the device and of the host.
constexpr int kMostInProcess = 2048;
// No more graphs where so many were launched fewer times than kLeastUse each.
constexpr int64_t kTried = 2 * Replays::kMostGraphs;
constexpr int64_t kLeastUse = 8;

std::atomic<int> graphs_of_process{0};
std::atomic<bool> is_stopped{false};

std::size_t hash_of(std::span<uintptr_t const> addresses) {
  std::size_t hash = 0xcbf29ce484222325;
  for (uintptr_t const address : addresses) {
    hash = (hash ^ (address >> 4)) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  return hash;
}

// Captures of other threads are none of ours, and ours are none of theirs.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(RelaxedCapture const&) = delete;
  RelaxedCapture& operator=(RelaxedCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream for captures on the current device, one at a time. Null where there is none.
class CaptureStream {
 public:
  CaptureStream() : lock_(mutex()) {
    static std::array<cudaStream_t, 64> streams{};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= int(streams.size())) return;
    cudaStream_t& stream = streams[device];
    if (stream == nullptr &&
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      stream = nullptr;
    }
    stream_ = stream;
  }
  cudaStream_t get() const { return stream_; }

 private:
  static std::mutex& mutex() {
    static std::mutex value;
    return value;
  }
  std::scoped_lock<std::mutex> lock_;
  cudaStream_t stream_ = nullptr;
};

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // a launch says what is wrong
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// What a graph launches, as an error names it.
std::string joined(std::vector<std::string> const& steps) {
  std::string result = "graph of";
  for (std::string const& step : steps) result += (&step == &steps.front() ? " " : "; ") + step;
  return result;
}

void destroy(cudaGraphExec_t graph) {
  // What is under way ends first. The runtime may be gone when a process ends.
  if (cudaGraphExecDestroy(graph) != cudaSuccess) cudaGetLastError();
  --graphs_of_process;
}

bool replays_launches() {
  static bool const value = [] {
    char const* const text = std::getenv("FUSEDCONV_REPLAY");
    return text == nullptr || std::string_view(text) != "0";
  }();
  return value && !is_stopped;
}

}  // namespace

void Replays::stop() { is_stopped = true; }

Replays::~Replays() {
  for (Kept const& each : kept_) destroy(each.graph);
}

int Replays::graphs() const {
  std::scoped_lock const lock(mutex_);
  return int(kept_.size());
}

void Replays::run(std::span<uintptr_t const> addresses, cudaStream_t stream,
                  std::function<void(cudaStream_t)> const& launch,
                  std::function<std::vector<std::string>()> const& steps) {
  if (!replays_launches() || is_captured(stream)) return launch(stream);
  {
    std::scoped_lock const lock(mutex_);
    if (launch_kept(addresses, stream, steps)) return;
    if (makes_ && seen_before(addresses)) {
      if (cudaGraphExec_t const graph = capture(launch)) {
        keep(addresses, graph);
        if (launch_kept(addresses, stream, steps)) return;
      }
    }
  }
  launch(stream);
}

bool Replays::launch_kept(std::span<uintptr_t const> addresses, cudaStream_t stream,
                          std::function<std::vector<std::string>()> const& steps) {
  auto const found = std::ranges::find_if(
      kept_, [&](Kept const& each) { return std::ranges::equal(each.addresses, addresses); });
  if (found == kept_.end()) return false;
  kept_.splice(kept_.begin(), kept_, found);
  cudaError_t const status = cudaGraphLaunch(found->graph, stream);
  if (status != cudaSuccess) FUSEDCONV_CUDA(joined(steps()), status);
  ++launched_;
  return true;
}

bool Replays::seen_before(std::span<uintptr_t const> addresses) {
  std::size_t const hash = hash_of(addresses);
  if (std::ranges::find(hashes_, hash) != hashes_.end()) return true;
  if (hashes_.size() < kRemembered) {
    hashes_.push_back(hash);
  } else {
    hashes_[next_hash_++ % kRemembered] = hash;
  }
  return false;
}

cudaGraphExec_t Replays::capture(std::function<void(cudaStream_t)> const& launch) {
  makes_ = made_ < kTried || launched_ >= kLeastUse * made_;
  if (!makes_ || graphs_of_process >= kMostInProcess) return nullptr;
  RelaxedCapture const relaxed;
  CaptureStream const stream;
  if (stream.get() == nullptr ||
      cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed) != cudaSuccess) {
    cudaGetLastError();
    makes_ = false;
    return nullptr;
  }
  bool launches = true;
  try {
    launch(stream.get());
  } catch (std::exception const&) {
    launches = false;  // launched directly, it says what is wrong
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t result = nullptr;
  std::size_t nodes = 0;
  bool const ended = cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess;
  if (launches && ended && cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes > 0 &&
      cudaGraphInstantiate(&result, graph, 0) != cudaSuccess) {
    result = nullptr;
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // of whatever did not succeed
  makes_ = result != nullptr;
  if (makes_) {
    ++made_;
    ++graphs_of_process;
  }
  return result;
}

void Replays::keep(std::span<uintptr_t const> addresses, cudaGraphExec_t graph) {
  kept_.push_front({{addresses.begin(), addresses.end()}, graph});
  if (kept_.size() > kMostGraphs) {
    destroy(kept_.back().graph);
    kept_.pop_back();
  }
}

}  // namespace fusedconv
