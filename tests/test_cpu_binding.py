"""The processor's loops called directly: the other layout, another dtype, two activations, each
instruction set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import python
from reference import (
    ACTIVATIONS,
    GRADIENT_FLOOR,
    assert_as_accurate_as_torch,
    channels_last,
    cotangent,
)
from torch.nn import functional as F

from fusedconv import _C
from fusedconv.precision import COMPILED_DTYPES

PLACES = {"nchw": lambda x: x.contiguous(), "nhwc": channels_last}
DTYPES = list(COMPILED_DTYPES)
#: What may be read and written: one of them is float32 where they differ.
CONVERSIONS = [
    (read, written)
    for read in DTYPES
    for written in DTYPES
    if read == written or torch.float32 in (read, written)
]
NAMES = [name or "identity" for name in ACTIVATIONS]
#: (batch, channels, pixels, groups): one channel, fewer than a vector, not a multiple of one, one
#: pixel, tiles with remainders in both directions, more channels than a tile, several parts.
SIZES = [
    (2, 1, 37, 1),
    (2, 3, 35, 3),
    (3, 20, 5, 4),
    (1, 33, 130, 11),
    (2, 130, 67, 10),
    (4, 36, 1, 3),
    (1, 33, 1, 3),
    (1, 600, 17, 8),
    (1, 9000, 3, 9),
    (1, 2, 40_001, 1),
]
GUARD = 64


def problem(size, read, written, layouts, before="identity", after="identity", eps=1e-5):
    batch, channels, pixels, groups = size
    return _C.GroupNormProblem(
        batch=batch,
        channels=channels,
        pixels=pixels,
        groups=groups,
        eps=eps,
        input_layout=_C.Layout[layouts[0]],
        output_layout=_C.Layout[layouts[1]],
        dtype=COMPILED_DTYPES[read],
        output_dtype=COMPILED_DTYPES[written],
        affine_dtype=_C.DType.float32,
        activation_before=_C.Activation[before],
        activation_after=_C.Activation[after],
    )


def values(size, dtype, layout="nchw", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size[:3], generator=generator, dtype=torch.float64) * 2 + 0.5
    return PLACES[layout](x.to(dtype))


class Guarded:
    """Memory for a tensor, poisoned, with guards on both sides."""

    def __init__(self, shape, dtype, layout="nchw"):
        count = torch.Size(shape).numel()
        self.memory = torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype)
        self.memory[:GUARD] = self.memory[-GUARD:] = 77
        inner = self.memory[GUARD:-GUARD]
        if layout == "nhwc":
            self.tensor = inner.view(shape[0], shape[2], shape[1]).transpose(1, 2)
        else:
            self.tensor = inner.view(shape)

    @property
    def address(self):
        return self.tensor.data_ptr()

    def check(self):
        """The tensor, after all of it and nothing else was written."""
        assert (self.memory[:GUARD] == 77).all()
        assert (self.memory[-GUARD:] == 77).all()
        assert self.tensor.isfinite().all()
        return self.tensor


#: What stands between the activations.
BETWEEN = ["group_norm", "layer_norm", "affine", None]


def composed(x, size, before, after, between=None, affine=()):
    x = ACTIVATIONS[None if before == "identity" else before](x)
    weight, bias = (t.to(x.dtype) for t in affine or parameters(size[1]))
    if between == "group_norm":
        x = F.group_norm(x, size[3], weight, bias, 1e-5)
    elif between == "layer_norm":
        x = F.layer_norm(x.transpose(1, 2), size[1:2], weight, bias, 1e-5).transpose(1, 2)
    elif between == "affine":
        x = x * weight[:, None] + bias[:, None]
    return ACTIVATIONS[None if after == "identity" else after](x)


def parameters(channels):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(channels, generator=generator) + 1 for _ in range(2)]


def check_forward(size, read, written, layouts, before, after, between, threads=2):
    x = values(size, read, layouts[0])
    output = Guarded(size[:3], written, layouts[1])
    compiled = problem(size, read, written, layouts, before, after)
    affine = parameters(size[1]) if between else ()
    addresses = [t.data_ptr() for t in affine] or [0, 0]
    if between == "group_norm":
        statistics = [Guarded((size[0], size[3]), torch.float32) for _ in range(2)]
        addresses += [s.address for s in statistics]
        _C.cpu.group_norm(compiled, x.data_ptr(), output.address, *addresses, threads)
        for each in statistics:
            each.check()
    else:
        run = _C.cpu.layer_norm if between == "layer_norm" else _C.cpu.activate
        run(compiled, x.data_ptr(), output.address, *addresses, threads)
    actual = output.check()
    exact = composed(x.double(), size, before, after, between, affine)
    torchs = composed(x.float(), size, before, after, between, affine).to(written)
    assert_as_accurate_as_torch(actual, torchs, exact)
    return actual


# ---- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layouts", [("nchw", "nhwc"), ("nhwc", "nchw")], ids="-".join)
@pytest.mark.parametrize(("read", "written"), CONVERSIONS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_other_layout(size, read, written, layouts, between):
    for before, after in (("identity", "identity"), ("gelu", "identity"), ("relu", "silu")):
        check_forward(size, read, written, layouts, before, after, between)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize(
    ("read", "written"), [pair for pair in CONVERSIONS if pair[0] != pair[1]], ids=str
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_another_dtype_in_the_same_layout(size, read, written, layout, between):
    check_forward(size, read, written, (layout, layout), "silu", "identity", between)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("before", NAMES)
@pytest.mark.parametrize("after", NAMES)
def test_two_activations(before, after, between):
    for dtype in DTYPES:
        for first in PLACES:
            for second in PLACES:
                for size in ((2, 12, 77, 4), (1, 33, 700, 3)):
                    check_forward(size, dtype, dtype, (first, second), before, after, between)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layouts", [("nchw", "nhwc"), ("nhwc", "nchw")], ids="-".join)
def test_the_number_of_threads_changes_no_bit(layouts, between):
    for size in ((3, 12, 65 * 67, 4), (1, 130, 2001, 2), (16, 32, 81, 32)):
        expected = None
        for threads in (1, 2, 3, 16):
            arguments = (torch.float32, torch.bfloat16, layouts, "gelu", "silu", between)
            actual = check_forward(size, *arguments, threads=threads)
            assert expected is None or torch.equal(actual, expected)
            expected = actual


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(dtype, layout, between):
    """The output may be the input: the same bits, whatever is read again behind what is written."""
    for size in (*SIZES, (2, 64, 700, 4)):
        for before, after in (("identity", "identity"), ("gelu", "identity"), ("relu", "silu")):
            compiled = problem(size, dtype, dtype, (layout, layout), before, after)
            affine = parameters(size[1]) if between else ()
            addresses = [t.data_ptr() for t in affine] or [0, 0]
            rest = (0, 0) if between == "group_norm" else ()
            name = between if between in ("group_norm", "layer_norm") else "activate"
            x = values(size, dtype, layout)
            expected, actual = torch.empty_like(x), x.clone()
            for source, output in ((x, expected), (actual, actual)):
                getattr(_C.cpu, name)(
                    compiled, source.data_ptr(), output.data_ptr(), *addresses, *rest, 2
                )
            assert torch.equal(actual, expected), (size, before, after)


@pytest.mark.parametrize("call", ["group_norm", "activate", "layer_norm"])
@pytest.mark.parametrize(
    ("written", "layouts"),
    [(torch.float16, ("nchw", "nchw")), (torch.float32, ("nchw", "nhwc"))],
)
def test_another_tensor_is_written_in_another_form(call, written, layouts):
    x = torch.zeros(6)
    rest = (0,) * (4 if call == "group_norm" else 2)
    arguments = problem((1, 2, 3, 1), torch.float32, written, layouts)
    with pytest.raises(ValueError, match="output: got the input, expected another tensor"):
        getattr(_C.cpu, call)(arguments, x.data_ptr(), x.data_ptr(), *rest, 1)


def test_a_copy_to_the_other_layout_keeps_every_value():
    """No activation, no normalisation: NaN, infinities and denormals are what they were."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = every.reshape(1, 256, 256)
        output = torch.empty_like(x)
        arguments = problem((1, 256, 256, 1), dtype, dtype, ("nchw", "nhwc"))
        _C.cpu.activate(arguments, x.data_ptr(), output.data_ptr(), 0, 0, 2)
        torch.testing.assert_close(output.transpose(1, 2), x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("call", ["group_norm", "activate", "layer_norm"])
def test_one_of_two_dtypes_is_float32(call):
    arguments = problem((1, 2, 3, 1), torch.float16, torch.bfloat16, ("nchw", "nchw"))
    rest = (0,) * (4 if call == "group_norm" else 2)
    x, output = torch.zeros(6).half(), torch.zeros(6).bfloat16()
    with pytest.raises(ValueError, match="output_dtype: got bfloat16 for an input of float16"):
        getattr(_C.cpu, call)(arguments, x.data_ptr(), output.data_ptr(), *rest, 1)


# ---- gradients -----------------------------------------------------------------------------------


def check_gradients(size, read, written, layout, before, after, threads=2):
    x = values(size, read, layout)
    weight, bias = parameters(size[1])
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    output = composed(leaves[0], size, before, after, "group_norm", leaves[1:])
    grad = PLACES[layout](cotangent(output).to(read))
    exact = torch.autograd.grad(output, leaves, grad.double())
    floats = [t.float().requires_grad_() for t in (x, weight, bias)]
    output = composed(floats[0], size, before, after, "group_norm", floats[1:])
    torchs = torch.autograd.grad(output, floats, grad.float())

    act = ACTIVATIONS[None if before == "identity" else before](x.double())
    groups = act.reshape(size[0], size[3], -1)
    mean = groups.mean(-1).float()
    rstd = torch.rsqrt(groups.var(-1, correction=0) + 1e-5).float()
    found = [Guarded(size[:3], written, layout)]
    found += [Guarded((size[1],), torch.float32) for _ in range(2)]
    _C.cpu.group_norm_gradients(
        problem(size, read, written, (layout, layout), before, after),
        *(t.data_ptr() for t in (grad, x, mean, rstd, weight, bias)),
        *(each.address for each in found),
        threads,
    )
    for each, other, true in zip(found, torchs, exact, strict=True):
        actual = each.check()
        other = other.to(actual.dtype)
        assert_as_accurate_as_torch(actual, other, true, GRADIENT_FLOOR[torch.float32])


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize(
    ("read", "written"),
    [pair for pair in CONVERSIONS if pair[1] in (pair[0], torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients(size, read, written, layout):
    """Nothing outside of what is asked for is written, and all of it."""
    check_gradients(size, read, written, layout, "gelu", "identity")
    check_gradients(size, read, written, layout, "identity", "silu")


def gradient_addresses(**changes):
    """The arguments of a call for one gradient, none of which is read where it raises."""
    x = torch.zeros(3, 6, 35)
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    addresses = dict.fromkeys(names, x.data_ptr())
    gradients = dict.fromkeys(("grad_input", "grad_weight", "grad_bias"), 0)
    return {**addresses, **gradients, "threads": 1, **changes}


@pytest.mark.parametrize("name", ["grad_output", "input", "mean", "rstd"])
def test_gradients_need_what_was_saved(name):
    one = problem((1, 6, 5, 3), torch.float32, torch.float32, ("nchw", "nchw"))
    with pytest.raises(ValueError, match=f"{name}: got null"):
        _C.cpu.group_norm_gradients(one, **gradient_addresses(**{name: 0}))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.float32, torch.float32, ("nchw", "nhwc")), "output_layout: got nhwc"),
        ((torch.float32, torch.float16, ("nchw", "nchw")), "output_dtype: got float16"),
        (
            (torch.float32, torch.float32, ("nchw", "nchw"), "relu", "relu"),
            "activation_after: got relu behind relu",
        ),
    ],
    ids=["layout", "dtype", "two activations"],
)
def test_gradients_of_what_there_is_no_loop_for(arguments, text):
    with pytest.raises(ValueError, match=text):
        _C.cpu.group_norm_gradients(problem((1, 6, 5, 3), *arguments), **gradient_addresses())


def test_gradients_of_no_samples():
    """Sums of nothing; no input is asked for."""
    sums = torch.full((2, 6), torch.nan)
    _C.cpu.group_norm_gradients(
        problem((0, 6, 5, 3), torch.float32, torch.float32, ("nchw", "nchw")),
        *(0,) * 7,
        sums[0].data_ptr(),
        sums[1].data_ptr(),
        1,
    )
    assert not sums.any()


# ---- sums of channels ----------------------------------------------------------------------------


def check_channel_sums(size, dtype, layout, threads=2):
    x = values(size, dtype, layout)
    sums = Guarded((size[1],), torch.float32)
    one = problem(size, dtype, dtype, (layout, layout))
    _C.cpu.channel_sums(one, x.data_ptr(), sums.address, threads)
    exact = x.double().sum((0, 2))
    assert_as_accurate_as_torch(sums.check(), x.float().sum((0, 2)), exact)
    return sums.tensor


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (3, 5, 70_001, 1), (64, 256, 16, 1)], ids=str)
def test_channel_sums(size, dtype, layout):
    expected = check_channel_sums(size, dtype, layout)
    for threads in (1, 3, 16):
        assert torch.equal(check_channel_sums(size, dtype, layout, threads), expected)


def test_channel_sums_of_no_samples():
    sums = torch.full((6,), torch.nan)
    empty = problem((0, 6, 5, 3), torch.float32, torch.float32, ("nchw", "nchw"))
    _C.cpu.channel_sums(empty, 0, sums.data_ptr(), 1)
    assert not sums.any()
    one = problem((1, 6, 5, 3), torch.float32, torch.float32, ("nchw", "nchw"))
    with pytest.raises(ValueError, match="input: got null"):
        _C.cpu.channel_sums(one, 0, sums.data_ptr(), 1)


# ---- instruction sets ----------------------------------------------------------------------------

#: Run in a process of its own, as the choice is made once; its argument is this directory.
EVERY_LOOP = """
import sys
sys.path.insert(0, sys.argv[1])
import test_cpu_binding as tests

tests.check_every_loop(sys.argv[2])
"""


def check_every_loop(name):
    """Both passes in each dtype and layout, with the bounds of the other tests."""
    assert _C.cpu.instruction_set() == name
    for size in ((2, 12, 77, 4), (1, 33, 50, 11)):
        for read, written in CONVERSIONS:
            for first in PLACES:
                check_channel_sums(size, read, first)
                for second in PLACES:
                    for before, after in (("gelu", "identity"), ("identity", "silu")):
                        arguments = (size, read, written, (first, second), before, after)
                        for between in BETWEEN:
                            check_forward(*arguments, between)
                if written in (read, torch.float32):
                    for activation in NAMES:
                        check_gradients(size, read, written, first, activation, "identity")
                        check_gradients(size, read, written, first, "identity", activation)


def test_instruction_sets():
    """The widest is in use, where nothing else is said; the baseline is always there."""
    names = _C.cpu.instruction_sets()
    assert names[-1] == "baseline"
    assert len(set(names)) == len(names)
    assert _C.cpu.instruction_set() in names


@pytest.mark.parametrize("name", _C.cpu.instruction_sets())
def test_every_instruction_set(name):
    tests = str(Path(__file__).parent)
    result = python("-c", EVERY_LOOP, tests, name, FUSEDCONV_INSTRUCTION_SET=name)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("wanted", ["mmx", "AVX2", "avx"])
def test_an_instruction_set_that_is_not_there_is_refused(wanted):
    program = """
from fusedconv import _C
try:
    _C.cpu.instruction_set()
except ValueError as error:
    print(error)
"""
    result = python("-c", program, FUSEDCONV_INSTRUCTION_SET=wanted)
    names = ", ".join(_C.cpu.instruction_sets())
    expected = f'FUSEDCONV_INSTRUCTION_SET: got "{wanted}", expected one of {names}'
    assert result.stdout.strip() == expected, result.stderr


def test_an_empty_name_is_none():
    program = "from fusedconv import _C; print(_C.cpu.instruction_set())"
    result = python("-c", program, FUSEDCONV_INSTRUCTION_SET="")
    assert result.stdout.strip() == _C.cpu.instruction_sets()[0], result.stderr


# ---- huge pages ----------------------------------------------------------------------------------

BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal      1      2    145     38    413     94     49     37      1      2     40
Node 1, zone   Normal      9      9      9      9      9      9      9      9      9      0      0
"""


def test_free_memory_counts_where_it_is_in_large_pieces():
    def free(text, piece_bytes):
        return _C.cpu.free_bytes_in_pieces(text, page_bytes=4096, piece_bytes=piece_bytes)

    assert free(BUDDYINFO, 2 << 20) == (1 * 512 + 3 * 1024 + 2 * 512 + 40 * 1024) * 4096
    assert free(BUDDYINFO, 4 << 20) == 43 * (4 << 20)
    assert free(BUDDYINFO, 1 << 30) == 0
    assert free("", 4096) == 0
    assert free("no such table\nat all", 4096) == 0
