#include "program/program.hpp"

#include <algorithm>

#include "fusedconv/check.hpp"
#include "program/device_guard.hpp"

namespace fusedconv {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

}  // namespace

Program::Program(int device, int64_t batch, int64_t chunk)
    : device_(device), batch_(batch), chunk_(chunk <= 0 ? batch : std::min(chunk, batch)) {
  FUSEDCONV_CHECK(device >= 0, "device is ", device);
  FUSEDCONV_CHECK(batch > 0, "batch is ", batch);
}

Operand Program::tensor(int slot, int64_t bytes_per_sample) const {
  FUSEDCONV_CHECK(slot >= 0, "slot is ", slot);
  return {slot, 0, bytes_per_sample};
}

Operand Program::scratch(int64_t bytes_per_sample, int64_t bytes) {
  Operand const operand{kWorkspaceSlot, workspace_bytes_, 0};
  workspace_bytes_ += round_up(bytes_per_sample * chunk_ + bytes, kWorkspaceAlignment);
  return operand;
}

void* Program::Context::at(Operand const& operand) const {
  if (operand.slot == -1) return nullptr;
  uintptr_t const base = operand.slot == kWorkspaceSlot ? workspace : pointers[operand.slot];
  if (base == 0) return nullptr;
  return reinterpret_cast<void*>(base + operand.offset + operand.bytes_per_sample * first_sample);
}

groupnorm::StatisticsTargets Program::Context::at(StatisticsOperands const& operands) const {
  return {.statistics = static_cast<groupnorm::Statistics*>(at(operands.statistics)),
          .mean = static_cast<float*>(at(operands.mean)),
          .rstd = static_cast<float*>(at(operands.rstd))};
}

void Program::pack_filter(layout::PackFilter const& problem, Operand weight, Operand bias,
                          Operand filter, Operand packed_bias) {
  note({weight, bias, filter, packed_bias});
  once_.push_back([=](Context const& context) {
    layout::pack_filter(problem, context.at(weight), context.at(bias), context.at(filter),
                        context.at(packed_bias), context.stream);
  });
}

void Program::to_channels_last(layout::ToChannelsLast const& problem, Operand input,
                               Operand output) {
  note({input, output});
  steps_.push_back([=](Context const& context) {
    layout::ToChannelsLast chunk = problem;
    chunk.batch = context.samples;
    layout::to_channels_last(chunk, context.at(input), context.at(output), context.stream);
  });
}

void Program::convolution(int row, conv::ConvProblem const& problem, Activation activation,
                          Operand input, Operand filter, Operand bias, Operand output) {
  auto const& rows = conv::conv_rows();
  FUSEDCONV_CHECK(row >= 0 && row < int(rows.size()), "convolution: row is ", row, " of ",
                  rows.size());
  note({input, filter, bias, output});
  auto const launch = rows[row].launch;
  conv::ConvProblem largest = problem;
  largest.n = int(chunk_);
  int64_t const bytes = rows[row].workspace_bytes(largest);
  Operand const workspace = bytes > 0 ? scratch(0, bytes) : Operand{};
  steps_.push_back([=](Context const& context) {
    conv::ConvArguments arguments{problem,          context.at(input),  context.at(filter),
                                  context.at(bias), context.at(output), activation};
    arguments.problem.n = int(context.samples);
    arguments.workspace = context.at(workspace);
    launch(arguments, context.stream);
  });
}

void Program::sm90_convolution(conv::sm90::Plan const& plan, conv::sm90::FilterSource const& source,
                               Activation activation, bool activates_output,
                               groupnorm::Passes const& passes, Sm90Operands const& operands) {
  namespace sm90 = conv::sm90;
  sm90::Row const& row = sm90::rows()[plan.row];
  FUSEDCONV_CHECK(plan.schedule.obstacle.empty(), "sm90_convolution: ", row.name, ": ",
                  plan.schedule.obstacle);
  sm90::Schedule const& schedule = plan.schedule;
  bool const normalizes = operands.statistics.statistics.slot != -1;
  note({operands.input, operands.weight, operands.bias, operands.statistics.mean,
        operands.statistics.rstd, operands.norm_weight, operands.norm_bias, operands.output,
        operands.conv_output});
  Operand const filter = scratch(0, schedule.filter_bytes);
  Operand const output = scratch(sm90::output_bytes(plan.problem, schedule, row.math), 0);
  Operand const partials =
      normalizes ? scratch(sm90::partial_bytes(plan.problem, schedule), 0) : Operand{};
  once_.push_back([=, math = row.math, sharing = row.sharing](Context const& context) {
    sm90::pack_filter(source, plan.problem, plan.schedule, math, sharing,
                      context.at(operands.weight), context.at(filter), context.stream);
  });
  steps_.push_back([=, launch = row.launch](Context const& context) {
    sm90::Arguments arguments{.problem = plan.problem,
                              .schedule = plan.schedule,
                              .layout = plan.layout,
                              .activation = activation,
                              .activates_output = activates_output,
                              .input = context.at(operands.input),
                              .filter = context.at(filter),
                              .bias = context.at(operands.bias),
                              .output = context.at(output),
                              .partials = static_cast<groupnorm::Partial*>(context.at(partials)),
                              .multiprocessors = plan.multiprocessors};
    arguments.problem.n = int(context.samples);
    launch(arguments, context.stream);
  });
  steps_.push_back([=](Context const& context) {
    conv::ConvProblem problem = plan.problem;
    problem.n = int(context.samples);
    groupnorm::StatisticsTargets const statistics = context.at(operands.statistics);
    if (normalizes) {
      sm90::merge_moments(problem, plan.schedule, int(passes.problem.groups), passes.problem.eps,
                          static_cast<groupnorm::Partial const*>(context.at(partials)), statistics,
                          context.stream);
    }
    sm90::unpack(problem, plan.schedule, passes,
                 {.input = context.at(output),
                  .output = context.at(operands.output),
                  .conv_output = context.at(operands.conv_output),
                  .weight = context.at(operands.norm_weight),
                  .bias = context.at(operands.norm_bias),
                  .statistics = statistics.statistics},
                 context.stream);
  });
}

Operand Program::statistics_scratch(int64_t groups) {
  return scratch(groups * int64_t(sizeof(groupnorm::Statistics)), 0);
}

void Program::moments(groupnorm::Passes const& passes, Operand input,
                      StatisticsOperands const& statistics) {
  note({input, statistics.mean, statistics.rstd});
  Operand const partials = scratch(groupnorm::moments_workspace_bytes(passes, 1), 0);
  steps_.push_back([=](Context const& context) {
    groupnorm::Passes chunk = passes;
    chunk.problem.batch = context.samples;
    groupnorm::moments(chunk, context.at(input), context.at(statistics), context.at(partials),
                       context.stream);
  });
}

void Program::normalize(groupnorm::Passes const& passes, Operand input, Operand statistics,
                        Operand weight, Operand bias, Operand output) {
  note({input, weight, bias, output});
  steps_.push_back([=](Context const& context) {
    groupnorm::Passes chunk = passes;
    chunk.problem.batch = context.samples;
    GroupNormTensors const tensors{.input = context.at(input),
                                   .output = context.at(output),
                                   .weight = context.at(weight),
                                   .bias = context.at(bias)};
    groupnorm::normalize(chunk, tensors,
                         static_cast<groupnorm::Statistics const*>(context.at(statistics)),
                         context.stream);
  });
}

void Program::normalize_resident(groupnorm::ResidentPlan const& plan,
                                 groupnorm::Passes const& passes, Operand input, Operand mean,
                                 Operand rstd, Operand weight, Operand bias, Operand output) {
  FUSEDCONV_CHECK(chunk_ == batch_, "normalize_resident: chunk is ", chunk_, " of ", batch_);
  note({input, mean, rstd, weight, bias, output});
  steps_.push_back([=](Context const& context) {
    GroupNormTensors const tensors{.input = context.at(input),
                                   .output = context.at(output),
                                   .weight = context.at(weight),
                                   .bias = context.at(bias),
                                   .mean = static_cast<float*>(context.at(mean)),
                                   .rstd = static_cast<float*>(context.at(rstd))};
    groupnorm::normalize_resident(plan, passes, tensors, context.stream);
  });
}

void Program::normalize_streamed(groupnorm::StreamPlan const& plan, groupnorm::Passes const& passes,
                                 Operand input, Operand mean, Operand rstd, Operand weight,
                                 Operand bias, Operand output) {
  FUSEDCONV_CHECK(chunk_ == batch_, "normalize_streamed: chunk is ", chunk_, " of ", batch_);
  note({input, mean, rstd, weight, bias, output});
  Operand const words = scratch(0, groupnorm::streamed_workspace_bytes(plan));
  steps_.push_back([=](Context const& context) {
    GroupNormTensors const tensors{.input = context.at(input),
                                   .output = context.at(output),
                                   .weight = context.at(weight),
                                   .bias = context.at(bias),
                                   .mean = static_cast<float*>(context.at(mean)),
                                   .rstd = static_cast<float*>(context.at(rstd))};
    groupnorm::normalize_streamed(plan, passes, tensors, context.at(words), context.stream);
  });
}

void Program::note(std::initializer_list<Operand> operands) {
  for (Operand const& operand : operands) slots_ = std::max(slots_, operand.slot + 1);
}

void Program::run(std::vector<uintptr_t> const& pointers, uintptr_t workspace,
                  uintptr_t stream) const {
  FUSEDCONV_CHECK(int(pointers.size()) >= slots_, "run: ", pointers.size(), " pointers for ",
                  slots_, " slots");
  FUSEDCONV_CHECK(workspace != 0 || workspace_bytes_ == 0, "run: no workspace, ", workspace_bytes_,
                  " bytes needed");
  DeviceGuard const guard(device_);
  Context context{pointers.data(), workspace, 0, batch_, reinterpret_cast<cudaStream_t>(stream)};
  for (Step const& step : once_) step(context);
  for (int64_t first = 0; first < batch_; first += chunk_) {
    context.first_sample = first;
    context.samples = std::min(chunk_, batch_ - first);
    for (Step const& step : steps_) step(context);
  }
}

}  // namespace fusedconv
