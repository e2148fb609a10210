"""Third parties' kernels: what they say and return is held against what they were asked for."""

from __future__ import annotations

import pytest
import torch
from problems import backward_problem, problem
from toys import HERE, Toy, ToyBackward, ToyBackwardPlan, filled

from fusedconv import Gradients, KernelError, Outputs
from fusedconv.checking import CheckedPlan, compiled, gradient_shapes, is_built_in
from fusedconv.kernels.torch import TorchForward, TorchPlan
from fusedconv.plan import BackwardTensors, ForwardPlan

SAVED = problem(batch=2, save=True)


class Returning(ForwardPlan):
    """torch's result, changed."""

    kernel = "returning"
    steps = ("a step",)

    def __init__(self, asked, change):
        self.asked, self.change = asked, change

    def run(self, *tensors):
        return self.change(TorchPlan(self.asked).run(*tensors), tensors[0])


class ReturningKernel(Toy):
    def __init__(self, change):
        super().__init__("returning")
        self.change = change

    def compile(self, problem, device):
        return Returning(problem, self.change)


def tensors_of(asked):
    conv, norm = asked.conv, asked.norm
    torch.manual_seed(0)
    channels = torch.randn(conv.out_channels)
    affine = (channels, channels) if norm is not None and norm.weight else (None, None)
    return (
        torch.randn(asked.input_shape),
        torch.randn(conv.weight_shape),
        channels if asked.bias else None,
        *affine,
    )


def test_a_right_result_passes_with_the_plans_steps():
    plan = compiled(ReturningKernel(lambda outputs, input: outputs), SAVED, HERE)
    assert isinstance(plan, CheckedPlan)
    assert plan.steps == ("a step",)
    given = tensors_of(SAVED)
    assert torch.equal(plan.run(*given).output, TorchPlan(SAVED).run(*given).output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, x: o.output, "result: got Tensor, expected fusedconv.Outputs"),
        (lambda o, x: o._replace(output=None), "output: got None, expected a tensor"),
        (lambda o, x: o._replace(output=o.output[:1]), "shape of output: got (1, "),
        (lambda o, x: o._replace(output=o.output.double()), "dtype of output: got torch.float64"),
        (lambda o, x: o._replace(output=o.output.to("meta")), "device of output: got meta"),
        (lambda o, x: o._replace(conv_output=None), "conv_output: got None"),
        (lambda o, x: o._replace(mean=o.mean.half()), "dtype of mean: got torch.float16"),
        (lambda o, x: o._replace(rstd=o.rstd[0]), "shape of rstd: got "),
    ],
)
def test_a_wrong_result_names_the_kernel_and_what_is_wrong(change, message):
    plan = compiled(ReturningKernel(change), SAVED, HERE)
    with pytest.raises(KernelError) as raised:
        plan.run(*tensors_of(SAVED))
    assert str(raised.value).startswith(f"returning: {message}")


def test_a_result_beside_an_argument_in_one_allocation_passes():
    asked = problem(batch=2, conv=None, norm=None, activation="identity")
    arena = torch.randn(2, *asked.input_shape)

    def beside(outputs, input):
        return Outputs(arena[1].copy_(input), None, None, None)

    plan = compiled(ReturningKernel(beside), asked, HERE)
    assert torch.equal(plan.run(arena[0], None, None, None, None).output, arena[0])


def test_a_result_in_an_arguments_memory_is_refused():
    asked = problem(batch=2, conv=None, norm=None, activation="identity")
    plan = compiled(ReturningKernel(lambda o, x: Outputs(x, None, None, None)), asked, HERE)
    with pytest.raises(KernelError, match="memory of output: got that of an argument"):
        plan.run(torch.randn(asked.input_shape), None, None, None, None)


BACKWARD = backward_problem().part(("epilogue",))


class ReturningGradients(ToyBackward):
    def __init__(self, change):
        super().__init__("returning", ["epilogue"])
        self.change = change

    def compile(self, problem, device):
        plan = ToyBackwardPlan(self.name, problem, {})
        # Which nobody believes.
        plan.is_exact = True
        shapes = gradient_shapes(problem)
        found = Gradients(**{name: torch.zeros(shape) for name, shape in shapes.items()})
        plan.run = lambda tensors: self.change(found)
        return plan


def gradients_by(change):
    nothing = (None,) * 7
    plan = compiled(ReturningGradients(change), BACKWARD, HERE)
    assert not plan.is_exact
    return plan.run(BackwardTensors(torch.zeros(BACKWARD.forward.output_shape), *nothing))


def test_right_gradients_pass_and_may_be_wider():
    found = gradients_by(lambda found: found._replace(norm_weight=found.norm_weight.double()))
    assert found.conv_output.shape == BACKWARD.forward.output_shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tuple, "result: got tuple, expected fusedconv.Gradients"),
        (lambda f: f._replace(conv_output=None), "gradient of conv_output: got None"),
        (lambda f: f._replace(norm_bias=f.norm_bias[1:]), "shape of gradient of norm_bias: got ("),
        (
            lambda f: f._replace(conv_output=f.conv_output.to("meta")),
            "device of gradient of conv_output: got meta",
        ),
    ],
)
def test_wrong_gradients_name_the_kernel_and_what_is_wrong(change, message):
    """Where one is missing between two parts, the next would go on with the output's."""
    with pytest.raises(KernelError) as raised:
        gradients_by(change)
    assert str(raised.value).startswith(f"returning: {message}")


class Saying(Toy):
    def __init__(self, support, cost, plan):
        super().__init__("saying")
        self.says = support, cost, plan

    def supports(self, problem, device):
        return self.says[0]

    def cost(self, problem, device):
        return self.says[1]

    def compile(self, problem, device):
        return self.says[2]


def test_one_that_says_neither_is_passed_over_with_its_reason(caplog):
    yes = Toy("yes").supports(SAVED, HERE)
    for says, reason in (
        ((True, 1.0, None), "supports(): got True, expected a fusedconv.Support"),
        ((yes, "fast", None), "cost(): got 'fast', expected milliseconds, a number"),
        ((yes, float("nan"), None), "cost(): got nan, expected milliseconds, a number"),
    ):
        registry = filled(Saying(*says), Toy("other", 2.0))
        for _ in range(2):
            other, saying = registry.candidates(SAVED, HERE)
        assert other.kernel.name == "other"
        assert other.support
        assert saying.support.reason == reason
        (warned,) = [each for each in caplog.messages if reason in each]
        assert warned == f"saying is passed over: {reason}"


def test_what_is_no_plan_is_refused():
    yes = Toy("yes").supports(SAVED, HERE)
    plan = Returning(SAVED, None)
    plan.steps = None
    with pytest.raises(KernelError, match="saying: steps of the plan: got None, expected a tuple"):
        compiled(Saying(yes, 1.0, plan), SAVED, HERE)
    with pytest.raises(KernelError, match=r"saying: compile\(\): got 'plan', expected a fusedconv"):
        compiled(Saying(yes, 1.0, "plan"), SAVED, HERE)


def test_built_in_plans_are_not_wrapped():
    assert is_built_in(TorchForward())
    assert isinstance(compiled(TorchForward(), SAVED, HERE), TorchPlan)
