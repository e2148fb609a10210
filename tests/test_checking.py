"""Third parties' kernels: what they say and return is held against what they were asked for."""

from __future__ import annotations

import pytest
import torch
from problems import problem
from toys import HERE, Toy, filled

from fusedconv import KernelError, Outputs
from fusedconv.checking import CheckedPlan, compiled, is_built_in
from fusedconv.kernels.torch import TorchForward, TorchPlan
from fusedconv.plan import ForwardPlan

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


def test_a_result_in_an_arguments_memory_is_refused():
    asked = problem(batch=2, conv=None, norm=None, activation="identity")
    plan = compiled(ReturningKernel(lambda o, x: Outputs(x, None, None, None)), asked, HERE)
    with pytest.raises(KernelError, match="memory of output: got that of an argument"):
        plan.run(torch.randn(asked.input_shape), None, None, None, None)


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


def test_what_a_kernel_says_of_itself_is_checked():
    yes = Toy("yes").supports(SAVED, HERE)
    for says, message in (
        ((True, 1.0, None), r"saying: supports\(\): got True, expected a fusedconv.Support"),
        ((yes, "fast", None), r"saying: cost\(\): got 'fast', expected milliseconds"),
        ((yes, float("nan"), None), r"saying: cost\(\): got nan"),
    ):
        with pytest.raises(KernelError, match=message):
            filled(Saying(*says)).candidates(SAVED, HERE)
    with pytest.raises(KernelError, match=r"saying: compile\(\): got 'plan', expected a fusedconv"):
        compiled(Saying(yes, 1.0, "plan"), SAVED, HERE)


def test_built_in_plans_are_not_wrapped():
    assert is_built_in(TorchForward())
    assert isinstance(compiled(TorchForward(), SAVED, HERE), TorchPlan)
