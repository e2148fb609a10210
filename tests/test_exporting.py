"""Programs with our operators in torch's own: exported, compiled ahead of time, converted to ONNX,
and run where the package is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from operators import CONV, CONV_CASES, NORM, NORM_CASES, conv_arguments, norm_arguments
from processes import python
from reference import TORCH_SCRIPTS
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusedconv
from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.functional import conv_transpose_act_norm

#: Of results in torch's operators against ours, by the input's dtype; gradients through groups of
#: few values lose digits.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 4e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}

# torch pickles its own tree specifications in a way that it deprecates.
exports = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")


def targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def assert_in_torch(graph: torch.fx.Graph) -> None:
    assert targets(graph)
    assert not [target for target in targets(graph) if "fusedconv" in target]


def assert_decomposes(operator, arguments) -> None:
    """The operator's results, dtypes and layouts, by a graph of torch's operators."""
    places = [i for i, each in enumerate(arguments) if isinstance(each, torch.Tensor)]

    def call(*tensors):
        values = dict(zip(places, tensors, strict=True))
        return operator(*(values.get(i, each) for i, each in enumerate(arguments)))

    tensors = [arguments[place] for place in places]
    graph = make_fx(call, decomposition_table=fusedconv.decompositions())(*tensors)
    assert_in_torch(graph.graph)
    for actual, expected in zip(graph(*tensors), call(*tensors), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCES[tensors[0].dtype])
        assert actual.stride() == expected.stride()


# ---- the operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("case", CONV_CASES)
def test_the_convolution_decomposes(case, save):
    assert_decomposes(CONV, conv_arguments(**CONV_CASES[case], save=save))


@pytest.mark.parametrize("case", NORM_CASES)
def test_group_norm_decomposes(case):
    assert_decomposes(NORM, norm_arguments(**NORM_CASES[case]))


def assert_gradients_decompose(case, mask):
    *arguments, _ = conv_arguments(**CONV_CASES[case])
    output, *saved = CONV(*arguments, True)
    grad = torch.randn_like(output)
    operator = torch.ops.fusedconv.conv_transpose_act_norm_backward
    assert_decomposes(operator, (grad, *saved, mask, *arguments))


@pytest.mark.parametrize("case", CONV_CASES)
def test_the_convolutions_gradients_decompose(case):
    assert_gradients_decompose(case, (True,) * 5)


@pytest.mark.parametrize("mask", [(False, True, False, True, False), (False,) * 4 + (True,)])
def test_some_of_the_convolutions_gradients_decompose(mask):
    assert_gradients_decompose("system 1", mask)


@pytest.mark.parametrize("case", NORM_CASES)
def test_gradients_of_group_norm_decompose(case):
    arguments = norm_arguments(**NORM_CASES[case])
    output, *saved = NORM(*arguments)
    operator = torch.ops.fusedconv.group_norm_backward
    assert_decomposes(operator, (torch.randn_like(output), *saved, (True,) * 3, *arguments))


def test_every_operator_has_a_decomposition():
    namespace = torch.ops.fusedconv
    registered = {
        name.removeprefix("fusedconv::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fusedconv::")
    }
    table = fusedconv.decompositions()
    assert {getattr(namespace, name).default for name in registered} == set(table)
    table.clear()
    assert fusedconv.decompositions(), "the table is the caller's"


def test_a_precision_that_torch_would_not_follow_is_refused():
    """On CUDA; a processor's float32 is strict."""
    wrong = "fp32" if torch.backends.cudnn.allow_tf32 else "tf32"
    with torch._subclasses.FakeTensorMode():
        x, weight = torch.empty(1, 4, 5, 5, device="cuda"), torch.empty(4, 4, 3, 3, device="cuda")
    call = make_fx(
        lambda x, weight: conv_transpose_act_norm(x, weight, precision=wrong),
        decomposition_table=fusedconv.decompositions(),
    )
    with pytest.raises(NotImplementedError, match=f"precision: got '{wrong}'"):
        call(x, weight)


# ---- programs ------------------------------------------------------------------------------------


class Network(nn.Module):
    """Both operators with ordinary torch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ConvTransposeActNorm2d(4, 6, 3, 2, activation="gelu", num_groups=3)
        self.norm = GroupNorm(2, 6, activation="silu", order="norm_act")
        self.last = nn.Conv2d(6, 2, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return self.last(self.norm(self.up(x)))


INPUT = (2, 4, 5, 7)
OTHER = (3, 4, 9, 7)
DYNAMIC = {"x": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=3)}}


def core_aten():
    table = torch.export.default_decompositions()
    table.update(fusedconv.decompositions())
    return table


def exported(model: nn.Module, *, decomposed: bool = True) -> torch.export.ExportedProgram:
    program = torch.export.export(model, (torch.randn(INPUT),), dynamic_shapes=DYNAMIC)
    assert any("fusedconv" in target for target in targets(program.graph))
    return program.run_decompositions(fusedconv.decompositions()) if decomposed else program


@exports
@pytest.mark.parametrize("table", [fusedconv.decompositions, core_aten])
def test_programs_decompose(table):
    model = Network()
    program = exported(model, decomposed=False).run_decompositions(table())
    assert_in_torch(program.graph)
    # A trace's constants would serve one size alone.
    for shape in (INPUT, OTHER):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), **TOLERANCES[torch.float32])


@exports
def test_programs_of_converted_models_decompose():
    plain = nn.Sequential(nn.ConvTranspose3d(4, 6, 2, 2), nn.ReLU(), nn.GroupNorm(3, 6))
    x = torch.randn(2, 4, 3, 4, 5)
    expected = plain(x)
    assert fusedconv.convert(plain).replaced
    program = torch.export.export(plain, (x,))
    assert any("fusedconv" in target for target in targets(program.graph))
    program = program.run_decompositions(fusedconv.decompositions())
    assert_in_torch(program.graph)
    torch.testing.assert_close(program.module()(x), expected, **TOLERANCES[torch.float32])


def without_the_package(code: str, folder: Path):
    """Runs code where importing fusedconv raises, in the folder with the files."""
    return python("-c", f"import sys; sys.modules['fusedconv'] = None\n{code}", str(folder))


COMPARE = """
from pathlib import Path
import torch
folder = Path(sys.argv[1])
x, expected = torch.load(folder / "tensors.pt")
{load}
torch.testing.assert_close(call(x), expected, rtol=1e-4, atol=1e-4)
"""
PROGRAM = COMPARE.format(load='call = torch.export.load(folder / "program.pt2").module()')
PACKAGE = COMPARE.format(load='call = torch._inductor.aoti_load_package(folder / "model.pt2")')


def save_tensors(model: nn.Module, folder: Path) -> None:
    x = torch.randn(OTHER)
    with torch.no_grad():
        torch.save((x, model(x)), folder / "tensors.pt")


@exports
@pytest.mark.parametrize("decomposed", [True, False])
def test_a_decomposed_program_runs_without_the_package(decomposed, tmp_path):
    model = Network()
    torch.export.save(exported(model, decomposed=decomposed), tmp_path / "program.pt2")
    save_tensors(model, tmp_path)
    done = without_the_package(PROGRAM, tmp_path)
    assert (done.returncode == 0) == decomposed, done.stderr


@exports
@TORCH_SCRIPTS
def test_a_decomposed_program_compiles_ahead_of_time(cpp_compiler, tmp_path):
    model = Network()
    package = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(exported(model), package_path=package)
    save_tensors(model, tmp_path)
    done = without_the_package(PACKAGE, tmp_path)
    assert done.returncode == 0, done.stderr


# ---- ONNX ----------------------------------------------------------------------------------------


def run_onnx(program, x: torch.Tensor) -> torch.Tensor:
    """What the reference runtime of ONNX computes of a program without operators of ours."""
    runtime = pytest.importorskip("onnxruntime")
    assert set(program.model.opset_imports) == {""}
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    (name,) = (each.name for each in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def to_onnx(model, *arguments, **keywords):
    pytest.importorskip("onnxscript")
    return torch.onnx.export(model, *arguments, dynamo=True, verbose=False, **keywords)


@exports
def test_models_convert_to_onnx():
    model = Network().eval()
    x = torch.randn(OTHER)
    program = to_onnx(model, (torch.randn(INPUT),), dynamic_shapes=DYNAMIC)
    torch.testing.assert_close(run_onnx(program, x), model(x), **TOLERANCES[torch.float32])
    # The model's next export holds our operators.
    exported(model, decomposed=False)


@exports
def test_decomposed_programs_convert_to_onnx():
    model = Network()
    x = torch.randn(OTHER)
    program = to_onnx(exported(model))
    torch.testing.assert_close(run_onnx(program, x), model(x), **TOLERANCES[torch.float32])


class Variants(nn.Module):
    """A layer of each normalisation and activation, in both orders."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 3, 2))
        self.affine = nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        weight, bias = self.affine
        return torch.stack([
            conv_transpose_act_norm(
                x, self.weight, bias, 2, 1, activation=activation, order=order, norm=norm,
                num_groups=2 if norm == "group" else None, norm_weight=weight, norm_bias=bias,
            )
            for norm in ("group", "instance", "layer", "affine")
            for activation in (None, "relu", "gelu", "gelu_tanh", "silu")
            for order in ("act_norm", "norm_act")
        ])  # fmt: skip


@exports
def test_every_variant_converts_to_onnx():
    model = Variants().eval()
    x = torch.randn(2, 4, 5, 6)
    program = to_onnx(model, (x,))
    torch.testing.assert_close(run_onnx(program, x), model(x), **TOLERANCES[torch.float32])
