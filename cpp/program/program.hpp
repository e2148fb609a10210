// A program: the steps of a plan with their operands resolved, run by one call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "conv/convolution.hpp"
#include "conv/sm90.hpp"
#include "groupnorm/groupnorm.hpp"
#include "groupnorm/resident.hpp"
#include "groupnorm/streamed.hpp"
#include "layout/layout.hpp"

namespace fusedconv {

// Where a step finds a tensor: a pointer that the caller passes (slot) or a part of the workspace,
// and how far it lies on for each further sample of the batch.
struct Operand {
  int slot = -1;       // index into run()'s pointers; -1: absent; kWorkspaceSlot: workspace
  int64_t offset = 0;  // bytes
  int64_t bytes_per_sample = 0;  // 0: the same for every chunk of samples
};

// Steps run in order over chunks of samples, which bounds the scratch between them. Steps before
// the first chunk (packing a filter) run once. run() switches to the program's device and back.
class Program {
 public:
  static constexpr int kWorkspaceSlot = -2;

  // chunk: samples a pass over the steps takes; 0 takes the whole batch.
  Program(int device, int64_t batch, int64_t chunk);

  // A tensor that the caller passes. bytes_per_sample is 0 for what all samples share.
  Operand tensor(int slot, int64_t bytes_per_sample) const;
  // Scratch of one chunk: bytes for each of its samples, and bytes for the chunk as a whole.
  Operand scratch(int64_t bytes_per_sample, int64_t bytes);

  void pack_filter(layout::PackFilter const& problem, Operand weight, Operand bias, Operand filter,
                   Operand packed_bias);
  void to_channels_last(layout::ToChannelsLast const& problem, Operand input, Operand output);
  void convolution(int row, conv::ConvProblem const& problem, Activation activation, Operand input,
                   Operand filter, Operand bias, Operand output);
  // A group's statistics: scratch for the normalising pass (groupnorm::Statistics), absent where
  // there is no GroupNorm, and the mean and rstd that the caller saves, absent where it does not.
  struct StatisticsOperands {
    Operand statistics, mean, rstd;
  };
  // A whole transposed convolution with what follows it. Without statistics the passes only
  // activate and turn the output; an absent conv_output is not kept.
  struct Sm90Operands {
    Operand input, weight, bias;
    StatisticsOperands statistics;
    Operand norm_weight, norm_bias, output, conv_output;
  };
  void sm90_convolution(conv::sm90::Plan const& plan, conv::sm90::FilterSource const& filter,
                        Activation activation, bool activates_output,
                        groupnorm::Passes const& passes, Sm90Operands const& operands);
  // 16 bytes for each sample and group.
  Operand statistics_scratch(int64_t groups);
  void moments(groupnorm::Passes const& passes, Operand input,
               StatisticsOperands const& statistics);
  void normalize(groupnorm::Passes const& passes, Operand input, Operand statistics, Operand weight,
                 Operand bias, Operand output);
  // One pass, both of them; the program must not be cut into chunks.
  void normalize_resident(groupnorm::ResidentPlan const& plan, groupnorm::Passes const& passes,
                          Operand input, Operand mean, Operand rstd, Operand weight, Operand bias,
                          Operand output);
  void normalize_streamed(groupnorm::StreamPlan const& plan, groupnorm::Passes const& passes,
                          Operand input, Operand mean, Operand rstd, Operand weight, Operand bias,
                          Operand output);

  int device() const { return device_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t chunk() const { return chunk_; }

  // Launches everything on the stream; never synchronises, never allocates.
  void run(std::vector<uintptr_t> const& pointers, uintptr_t workspace, uintptr_t stream) const;

 private:
  struct Context {
    uintptr_t const* pointers;
    uintptr_t workspace;
    int64_t first_sample;
    int64_t samples;
    cudaStream_t stream;
    void* at(Operand const& operand) const;
    groupnorm::StatisticsTargets at(StatisticsOperands const& operands) const;
  };
  using Step = std::function<void(Context const&)>;

  void note(std::initializer_list<Operand> operands);

  int device_;
  int64_t batch_;
  int64_t chunk_;
  int64_t workspace_bytes_ = 0;
  int slots_ = 0;
  std::vector<Step> once_;
  std::vector<Step> steps_;
};

}  // namespace fusedconv
