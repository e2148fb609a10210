"""The example of a third party's kernel: installed by pip, chosen, explained and correct."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import ROOT
from processes import python

PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the plugin into, from a copy: building writes beside sources."""
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = tmp_path_factory.mktemp("site")
    result = python(
        "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "--no-index", "--target", str(target), str(source),
        path=source,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def run(path: Path, code: str, **environment: str) -> str:
    result = python("-W", "error", "-c", code, path=path, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_chosen_and_explained(installed):
    text = run(
        installed,
        "import torch, fusedconv\n"
        "fusedconv.explain(fusedconv.GroupNorm(2, 6).double(), torch.ones(2, 6, 5).double())\n",
    )
    assert "kernel: example_float64_group_norm (provider example, estimated " in text
    assert "1. torch.var_mean of each group" in text
    assert "torch: estimated " in text
    assert "cpu_group_norm: dtype is float64" in text


def test_it_serves_exactly_one_kind_of_problem(installed):
    text = run(
        installed,
        "import torch, fusedconv\n"
        "from fusedconv import functional as F\n"
        "x = torch.ones(2, 6, 5, dtype=torch.float64)\n"
        "w = torch.ones(6, 6, 3, dtype=torch.float64)\n"
        "for call in (\n"
        "    lambda: F.group_norm(x.float(), 2),\n"
        "    lambda: F.group_norm(x, 2, activation='gelu'),\n"
        "    lambda: F.group_norm(x[:0], 2),\n"
        "    lambda: F.conv_transpose_act_norm(x, w, num_groups=2),\n"
        "):\n"
        "    fusedconv.explain(call)\n",
    )
    assert "kernel: example" not in text
    for reason in (
        "dtype is torch.float32, only torch.float64 is served",
        "beside the normalisation there is gelu",
        "the input is empty",
        "normalises only; the problem has a convolution",
    ):
        assert f"example_float64_group_norm: {reason}" in text


def test_it_is_correct_and_differentiable(installed):
    run(
        installed,
        "import torch\n"
        "from torch.nn import functional as F\n"
        "from fusedconv.functional import group_norm\n"
        "from fusedconv.registry import registry\n"
        "kernel = next(k for k in registry().kernels() if k.provider == 'example')\n"
        "runs = []\n"
        "compile = kernel.compile\n"
        "kernel.compile = lambda *asked: (runs.append(asked[0]), compile(*asked))[1]\n"
        "torch.manual_seed(0)\n"
        "for shape in ((3, 6), (2, 6, 5), (2, 6, 5, 7), (2, 6, 2, 3, 4)):\n"
        "    x = torch.randn(shape, dtype=torch.float64) * 3 + 1e3\n"
        "    last = x.movedim(1, -1).contiguous().movedim(-1, 1)\n"
        "    wide = torch.stack([x, x], -1)[..., 0]\n"
        "    one, other = torch.randn(2, 6, dtype=torch.float64)\n"
        "    for weight, bias in ((None, None), (one, other), (None, other)):\n"
        "        expected = F.group_norm(x, 3, weight, bias, 1e-3)\n"
        "        for place in (x, last, wide):\n"
        "            actual = group_norm(place, 3, weight, bias, 1e-3)\n"
        "            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)\n"
        "            leaf = place.clone().requires_grad_()\n"
        "            group_norm(leaf, 3, weight, bias, 1e-3).pow(3).sum().backward()\n"
        "            theirs = x.clone().requires_grad_()\n"
        "            F.group_norm(theirs, 3, weight, bias, 1e-3).pow(3).sum().backward()\n"
        "            torch.testing.assert_close(leaf.grad, theirs.grad, rtol=1e-6, atol=1e-6)\n"
        "assert {p.layout for p in runs} == {'nchw', 'nhwc', 'strided'}\n"
        "assert {p.save for p in runs} == {True, False}\n",
    )


def test_it_can_be_forced(installed):
    code = (
        "import torch, fusedconv\n"
        "from fusedconv.functional import group_norm\n"
        "group_norm(torch.ones(2, 6, 5).double(), 2)\n"
        "try:\n"
        "    group_norm(torch.ones(2, 6, 5), 2)\n"
        "except fusedconv.NoKernelError as error:\n"
        "    print(error)\n"
    )
    for name in ("example", "example_float64_group_norm"):
        text = run(installed, code, FUSEDCONV_KERNEL=name)
        assert f"no kernel among {name} serves group_norm 2" in text
        assert "example_float64_group_norm: dtype is torch.float32" in text


def test_without_it_torch_serves(tmp_path):
    text = run(
        tmp_path,
        "import torch, fusedconv\n"
        "fusedconv.explain(fusedconv.GroupNorm(2, 6).double(), torch.ones(2, 6, 5).double())\n",
    )
    assert "kernel: torch" in text
    assert "example" not in text


def plugin(folder: Path, module: str, name: str, value: str) -> Path:
    """What pip leaves of a package with one entry point: its module and its metadata."""
    (folder / f"{name}_plugin.py").write_text(module)
    info = folder / f"{name}_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[fusedconv.kernels]\n{name} = {value}\n")
    return folder


#: One gradient of one kind of convolution: the weight's, in float64, of stride 1.
WEIGHT_GRADIENT = """
from torch.nn import functional as F

from fusedconv import BackwardKernel, BackwardPlan, Gradients, Support


class Plan(BackwardPlan):
    kernel = "float64_weight_gradient"
    steps = ("correlation of input and gradient",)
    runs = 0

    def run(self, tensors):
        Plan.runs += 1
        assert tensors.grad_conv_output is not None
        # [N, K, ...] correlated with [N, C, ...], samples summed: [K, C, *kernel_size].
        found = F.conv2d(tensors.of_convolution.transpose(0, 1), tensors.input.transpose(0, 1))
        return Gradients(weight=found.transpose(0, 1))


class Kernel(BackwardKernel):
    name = "float64_weight_gradient"
    provider = "theirs"
    computes = frozenset({"weight"})

    def supports(self, problem, device):
        conv = problem.forward.conv
        if device.type != "cpu" or problem.forward.precision != "fp64":
            return Support.no("computes in float64 on the processor")
        if (set(conv.stride), set(conv.dilation), set(conv.padding)) != ({1}, {1}, {0}):
            return Support.no("stride and dilation must be 1, padding 0")
        return Support.yes()

    def cost(self, problem, device):
        return 0.0

    def compile(self, problem, device):
        return Plan()


def register(registry):
    registry.register(Kernel())
"""


def test_a_kernel_of_one_gradient_serves_a_backward_pass(tmp_path):
    """Beside torch's for the other gradients, behind a forward pass that is torch's."""
    text = run(
        plugin(tmp_path, WEIGHT_GRADIENT, "weight", "weight_plugin:register"),
        "import torch, fusedconv\n"
        "from torch.nn import functional as F\n"
        "from fusedconv import training\n"
        "from fusedconv.functional import conv_transpose_act_norm\n"
        "from weight_plugin import Plan\n"
        "training.LEAST_GAIN = 0.0  # for small tensors\n"
        "torch.manual_seed(0)\n"
        "x = torch.randn(2, 4, 5, 6, dtype=torch.float64)\n"
        "leaves = [torch.randn(s, dtype=torch.float64).requires_grad_()"
        " for s in ((4, 6, 3, 2), (6,), (6,), (6,))]\n"
        "def ours(weight, bias, scale, shift, stride=1):\n"
        "    return conv_transpose_act_norm(x, weight, bias, stride, activation='gelu',\n"
        "        num_groups=2, norm_weight=scale, norm_bias=shift)\n"
        "def torchs(weight, bias, scale, shift, stride=1):\n"
        "    x_ = F.conv_transpose2d(x, weight, bias, stride)\n"
        "    return F.group_norm(F.gelu(x_), 2, scale, shift)\n"
        "def gradients(function, stride=1):\n"
        "    output = function(*leaves, stride)\n"
        "    output.pow(3).sum().backward()\n"
        "    found = [leaf.grad for leaf in leaves]\n"
        "    for leaf in leaves: leaf.grad = None\n"
        "    return found\n"
        "for stride, runs in ((1, 1), (1, 2), (2, 2)):\n"
        "    for one, other in zip(gradients(ours, stride), gradients(torchs, stride)):\n"
        "        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)\n"
        "    assert Plan.runs == runs, (stride, Plan.runs)\n"
        "fusedconv.explain(ours, *leaves, gradients=True)\n",
    )
    assert "kernel: torch (provider torch" in text
    assert "kernel of weight: float64_weight_gradient (provider theirs, estimated 0 ms)" in text
    assert "correlation of input and gradient" in text
    for part, name in (("epilogue", "torch_epilogue"), ("bias", "torch_convolution")):
        assert f"kernel of {part}: {name}_backward (provider torch" in text


@pytest.mark.parametrize(
    ("module", "value", "reason"),
    [
        ("import no_such_module", "broken_plugin:register", "ModuleNotFoundError"),
        ("", "broken_plugin:register", "AttributeError"),
        ("def register(registry): registry.register(1)", "broken_plugin:register", "TypeError"),
        ("def register(registry): 1 / 0", "broken_plugin:register", "ZeroDivisionError"),
    ],
    ids=["import", "no function", "no kernel", "raises"],
)
def test_a_broken_plugin_is_named(tmp_path, module, value, reason):
    text = run(
        plugin(tmp_path, module, "broken", value),
        "import torch, fusedconv\n"
        "try:\n"
        "    fusedconv.GroupNorm(2, 6)(torch.ones(2, 6, 5))\n"
        "except fusedconv.PluginError as error:\n"
        "    print(error)\n",
    )
    assert f"entry point 'broken' ({value}) of group 'fusedconv.kernels' failed: {reason}" in text
