"""torch's own samples of arguments, good and bad, for the operators the functions stand for."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from reference import CONVOLUTIONS, FLOOR, GRADIENT_FLOOR, double
from torch import Tensor
from torch.nn import functional as F
from torch.testing import make_tensor

from fusedconv import functional

# Importing torch's samples freezes the flags of torch.backends for the process, as torch's own
# tests set them by contexts alone; other tests of this process set them. And it imports what it
# finds, numba for one, whose warnings are not ours.
with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput
assert not torch.backends.flags_frozen()

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.complex64, torch.complex128, torch.int64, torch.uint8, torch.bool)

#: fusedconv's function and torch's, by the name of the OpInfo.
FUNCTIONS = {
    **{
        f"nn.functional.conv_transpose{axes}d": (functional.conv_transpose_act_norm, conv)
        for axes, conv in CONVOLUTIONS.items()
    },
    "nn.functional.group_norm": (functional.group_norm, F.group_norm),
}
ARGUMENTS = (
    "input|weight|bias|stride|padding|output_padding|groups|dilation|num_groups|eps|norm_weight"
    "|norm_bias"
)


def op_info(name: str) -> OpInfo:
    (op,) = (op for op in op_db if op.name == name and not op.variant_test_name)
    return op


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def double_tensors(value):
    return double(value) if is_tensor(value) else value


def assert_names_an_argument(error: BaseException) -> None:
    message = str(error)
    assert isinstance(error, ValueError | TypeError), repr(error)
    assert re.match(rf"({ARGUMENTS})\b.*: got .*expected ", message, re.DOTALL), message


def assert_as_accurate(
    actual: Tensor, torchs: Tensor, exact: Tensor, floor: float, least_scale: float
) -> None:
    """Error at most 1.1 times torch's and ``floor`` of the exact values or of ``least_scale``,
    which gradients that cancel to nothing are seen against; NaN exactly where torch has NaN."""
    assert actual.shape == torchs.shape
    assert actual.dtype == torchs.dtype
    assert torch.equal(actual.isnan(), torchs.isnan())
    actual, torchs, exact = (t.double().nan_to_num(nan=0.0) for t in (actual, torchs, exact))
    error, torch_error = float((actual - exact).norm()), float((torchs - exact).norm())
    limit = 1.1 * torch_error + floor * max(float(exact.norm()), least_scale)
    assert error <= limit, f"error {error:.3g}, torch's {torch_error:.3g}, limit {limit:.3g}"


def run(function, sample: SampleInput, cotangent: Tensor) -> list[Tensor]:
    """The output and the gradient of every tensor argument."""

    def leaf(value):
        return value.detach().requires_grad_() if is_tensor(value) else value

    arguments = [leaf(value) for value in (sample.input, *sample.args)]
    keywords = {name: leaf(value) for name, value in sample.kwargs.items()}
    leaves = [v for v in (*arguments, *keywords.values()) if is_tensor(v)]
    output = function(*arguments, **keywords)
    gradients = torch.autograd.grad(output, leaves, cotangent.to(output))
    return [output.detach(), *gradients]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples(name, dtype, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    op = op_info(name)
    assert dtype in op.supported_dtypes(device)
    ours, torchs = FUNCTIONS[name]
    floor, gradient_floor = FLOOR[dtype], GRADIENT_FLOOR[dtype]
    if device == "cuda" and dtype is torch.float32:
        floor = 3e-7  # a product of few terms as three TF32 products has 22 bits
    # The processor's convolutions are slow in 16 bits, and torch's own.
    variants = 1 if device == "cpu" and dtype.itemsize == 2 and "conv" in name else 2
    count = 0
    for dense in op.sample_inputs(device, dtype, requires_grad=True):
        for sample in (dense, dense.noncontiguous())[:variants]:
            shape = torchs(sample.input, *sample.args, **sample.kwargs).shape
            cotangent = make_tensor(shape, dtype=dtype, device=device)
            exact = run(torchs, sample.transform(double_tensors), cotangent)
            expected = run(torchs, sample, cotangent)
            actual = run(ours, sample, cotangent)
            assert len(actual) == len(expected) == len(exact)
            for number, values in enumerate(zip(actual, expected, exact, strict=True)):
                if number == 0:
                    assert_as_accurate(*values, floor, 0.0)
                else:
                    assert_as_accurate(*values, gradient_floor, float(cotangent.norm()))
            count += 1
    assert count >= 10 * variants


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_dtypes_are_refused_by_name(name, dtype, device):
    ours, _ = FUNCTIONS[name]
    for sample in op_info(name).sample_inputs(device, torch.float32):
        other = sample.transform(lambda value: value.to(dtype) if is_tensor(value) else value)
        with pytest.raises((TypeError, ValueError)) as caught:
            ours(other.input, *other.args, **other.kwargs)
        assert_names_an_argument(caught.value)


@pytest.mark.parametrize("device", DEVICES)
def test_error_inputs_of_group_norm(device):
    errors = list(op_info("nn.functional.group_norm").error_inputs(device))
    assert len(errors) >= 2
    for error in errors:
        sample = error.sample_input
        with pytest.raises((TypeError, ValueError)) as caught:
            functional.group_norm(sample.input, *sample.args, **sample.kwargs)
        assert_names_an_argument(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axes", CONVOLUTIONS)
def test_error_inputs_of_convolutions(axes, device):
    """torch has none for its transposed convolutions: those of its convolutions take their place,
    where torch refuses them of a transposed one too."""
    torchs, refused = CONVOLUTIONS[axes], 0
    for error in op_info(f"nn.functional.conv{axes}d").error_inputs(device):
        sample = error.sample_input
        try:
            expected = torchs(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, TypeError):
            refused += 1
            with pytest.raises((TypeError, ValueError)) as caught:
                functional.conv_transpose_act_norm(sample.input, *sample.args, **sample.kwargs)
            assert_names_an_argument(caught.value)
        else:
            actual = functional.conv_transpose_act_norm(sample.input, *sample.args, **sample.kwargs)
            torch.testing.assert_close(actual, expected)
    assert refused >= 3
