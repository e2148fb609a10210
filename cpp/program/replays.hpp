// CUDA graphs of launches that come again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace fusedconv {

// Keeps what a function launches on some addresses as a CUDA graph, so that the same launches on
// the same addresses are one call of the driver: each launch by itself takes the processor 5 to 15
// microseconds where its caches are cold. Of one alone it saves what working out its parameters
// takes, tensor maps among them. Memory that a caching allocator hands out comes again from step to
// step.
//
// A graph is made when addresses come for the second time, and the one that has rested longest is
// given up for it. Where they seldom come again no more are made.
class Replays {
 public:
  static constexpr int kMostGraphs = 16;

  Replays() = default;
  ~Replays();
  Replays(Replays const&) = delete;
  Replays& operator=(Replays const&) = delete;

  // Does what `launch(stream)` does on the current device, which must depend on nothing but
  // `addresses`. Called directly while the stream is captured, where a graph cannot be made, where
  // FUSEDCONV_REPLAY=0 in the environment says so, and after stop(). `steps` are named if a graph
  // fails.
  void run(std::span<uintptr_t const> addresses, cudaStream_t stream,
           std::function<void(cudaStream_t)> const& launch,
           std::function<std::vector<std::string>()> const& steps);

  int graphs() const;

  // From now on all launches of the process are direct.
  static void stop();

 private:
  struct Kept {
    std::vector<uintptr_t> addresses;
    cudaGraphExec_t graph;
  };

  bool launch_kept(std::span<uintptr_t const> addresses, cudaStream_t stream,
                   std::function<std::vector<std::string>()> const& steps);
  bool seen_before(std::span<uintptr_t const> addresses);
  // Null where no graph can be made, or none would help.
  cudaGraphExec_t capture(std::function<void(cudaStream_t)> const& launch);
  void keep(std::span<uintptr_t const> addresses, cudaGraphExec_t graph);

  mutable std::mutex mutex_;
  std::list<Kept> kept_;             // the latest first
  std::vector<std::size_t> hashes_;  // of addresses seen once, a ring
  std::size_t next_hash_ = 0;
  int64_t made_ = 0, launched_ = 0;
  bool makes_ = true;
};

}  // namespace fusedconv
