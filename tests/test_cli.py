"""The command line on a machine without a GPU."""

from __future__ import annotations

import io
import json

import pytest
import torch
from click.testing import CliRunner
from processes import python
from rich.console import Console

import fusedconv
from fusedconv import benchmark, registry, winners
from fusedconv.cli import main, progress
from fusedconv.cli.bench import record_line
from fusedconv.cli.demo import _rows, _shape
from fusedconv.cli.shapes import problems_of_file
from fusedconv.device import PROCESSOR
from fusedconv.models import SYSTEMS


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_info_for_programs():
    facts = json.loads(invoke("info", "--json"))
    assert facts["torch"] == torch.__version__
    assert facts["fusedconv_build"] == winners.build()
    assert facts["build"]["cuda"] == fusedconv.build["cuda"]
    assert facts["kernels"]["torch"] > 0
    assert isinstance(facts["devices"], list)


def test_info_says_what_was_compiled():
    output = invoke("info")
    assert fusedconv.__version__ in output
    assert winners.build() in output  # as `fusedconv cache show` names it
    assert torch.__version__ in output
    expected = "compiled for" if fusedconv.build["cuda"] else "not compiled"
    assert expected in output


def test_list_names_every_provider():
    output = invoke("list")
    for provider in ("torch", "cpu", "cutlass_sm80", "groupnorm_cuda"):
        assert provider in output


@pytest.mark.parametrize("system", ["system1", "system2", "system3"])
def test_explain_needs_no_gpu(system):
    output = invoke("explain", "--system", system, "--arch", "90")
    assert "sm_90" in output
    if fusedconv.build["cuda"]:
        provider = "groupnorm_cuda" if system == "system3" else "cutlass_sm90"
        assert f"provider {provider}" in output
        if system != "system3":
            output = invoke("explain", "--system", system, "--arch", "80")
            assert "provider cutlass_sm80" in output or "provider taps_sm80" in output
    else:
        assert "provider torch" in output
        assert "built without CUDA" in output


LARGE = "--batch 112 --in-channels 64 --spatial 512,512"
SMALL = "--batch 2 --in-channels 1280 --spatial 16,16 --num-groups 32 --precision fp16"


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        (LARGE, "groupnorm_streamed"),
        (f"{LARGE} --precision bf16", "groupnorm_streamed"),
        (f"{LARGE} --arch 80", "groupnorm_two_pass"),
        (f"{LARGE} --layout nhwc", "groupnorm_two_pass"),
        (f"{LARGE} --num-groups 1", "groupnorm_two_pass"),
        (SMALL, "groupnorm_resident"),
        (f"{SMALL} --layout nhwc", "groupnorm_resident"),
        ("--batch 4 --in-channels 64 --spatial 255,255", "groupnorm_streamed"),
        # A group must be whole 16 bytes.
        ("--batch 4 --in-channels 64 --num-groups 64 --spatial 255,255", "groupnorm_two_pass"),
    ],
)
def test_explain_chooses_the_group_norm_by_size_and_layout(arguments, kernel):
    """On a machine without a GPU, an H200 is assumed."""
    output = invoke("explain", "--out-channels", "0", *arguments.split())
    assert kernel in output.splitlines()[1], output


def test_explain_gives_the_backward_pass_where_it_is_asked_for():
    parts_of_one, step = ("epilogue", "input, weight, bias"), "torch.ops.aten.convolution_backward"
    if "sm90" in fusedconv.build.get("families", ()):
        parts_of_one, step = ("epilogue, bias", "input, weight"), "sm90_wgrad_tf32_3"
    for system, parts in (("system1", parts_of_one), ("system3", None)):
        without = invoke("explain", "--system", system)
        output = invoke("explain", "--system", system, "--gradients")
        assert "\ngradients of" not in without and "saving for backward" not in without
        forward, backward = output.split("\ngradients of ")
        assert "saving for backward" in forward.splitlines()[0]
        asked, *lines = backward.splitlines()
        if parts is None:
            assert asked.startswith("input, norm_weight, norm_bias through group_norm 8 on ")
            assert sum("kernel of epilogue: " in line for line in lines) == 1
            continue
        assert asked.startswith(
            "conv_output, input, weight, bias, norm_weight, norm_bias through conv_transpose2d"
        )
        for part in parts:
            assert sum(f"kernel of {part}: " in line for line in lines) == 1
        assert any(step in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "gradients"),
    [
        ("--no-bias", "conv_output, input, weight, norm_weight, norm_bias"),
        ("--num-groups 0", "conv_output, input, weight, bias"),
        ("--num-groups 0 --activation identity", "input, weight, bias"),
        ("--num-groups 0 --activation identity --no-bias", "input, weight"),
        ("--out-channels 0", "input, norm_weight, norm_bias"),
    ],
)
def test_explained_gradients_are_those_that_there_are(arguments, gradients):
    output = invoke("explain", "--gradients", *arguments.split())
    assert f"\ngradients of {gradients} through " in output


def test_explain_on_the_processor_gives_gradients_too():
    output = invoke("explain", "--gradients", "--device", "cpu", "--system", "system1")
    assert "kernel of epilogue: cpu_group_norm_backward" in output
    assert "runs on CUDA" in output or "built without CUDA" in output


def test_explain_gives_the_reason_of_a_refusal():
    output = invoke("explain", "--stride", "2")
    assert "cutlass_sm90" not in output.splitlines()[1]
    assert "stride is (2, 2)" in output or "built without CUDA" in output


def test_explain_on_the_processor_chooses_its_kernel():
    output = invoke("explain", "--device", "cpu", "--precision", "fp32", "--system", "system1")
    form = "ordinary_convolution" if PROCESSOR.vector_bytes == 64 else "conv_transpose"
    assert f"cpu_{form}" in output.splitlines()[1]
    output = invoke("explain", "--device", "cpu", "--precision", "fp32", "--system", "system3")
    assert "cpu_group_norm" in output.splitlines()[1]


def refused(*arguments: str) -> str:
    """What a command says that ends with exit code 2 and a line, not a traceback."""
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 2, result.output
    return result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "option", "expected"),
    [
        ("--spatial a,b", "--spatial", "got 'a,b', expected integers from 1"),
        ("--spatial 0,4", "--spatial", "got '0,4', expected integers from 1"),
        ("--spatial=", "--spatial", "got 0 axes, expected one, two or three"),
        ("--spatial 2,2,2,2", "--spatial", "got 4 axes, expected one, two or three"),
        ("--spatial 4,4 --padding 9", "--spatial", "give an output of (-12, -12)"),
        ("--batch -1", "--batch", "-1 is not in the range"),
        ("--in-channels 0", "--in-channels", "0 is not in the range"),
        ("--out-channels -64", "--out-channels", "-64 is not in the range"),
        ("--num-groups 7", "--num-groups", "got 7, expected a positive divisor of 64 channels"),
        ("--num-groups -8", "--num-groups", "-8 is not in the range"),
        ("--num-groups 0 --out-channels 0", "--num-groups", "got 0, expected at least 1"),
        ("--num-groups 7 --out-channels 0", "--num-groups", "divisor of 64 channels"),
        ("--norm layer --num-groups 8", "--num-groups", "got 8, expected none with --norm layer"),
        ("--norm layer --out-channels 0", "--norm", "got layer, expected group where"),
        ("--norm none", "--norm", "is not one of"),
        ("--groups 3", "--groups", "got 3, expected a positive divisor of 64"),
        ("--groups 3 --out-channels 63", "--groups", "divisor of 64 input channels"),
        ("--groups 0", "--groups", "0 is not in the range"),
        ("--stride 0", "--stride", "got '0', expected integers from 1"),
        ("--stride 1,1,1", "--stride", "got (1, 1, 1), expected 2 integers"),
        ("--kernel-size 0", "--kernel-size", "got '0', expected integers from 1"),
        ("--kernel-size 3,3,3", "--kernel-size", "got (3, 3, 3), expected 2 integers"),
        ("--padding -1", "--padding", "got '-1', expected integers from 0"),
        ("--dilation 0", "--dilation", "got '0', expected integers from 1"),
        ("--output-padding 1", "--output-padding", "got (1, 1), expected each smaller"),
        ("--arch 91", "--arch", "got 91, expected one of"),
        ("--device cpu --arch 80", "--arch", "got 80, expected none for a processor"),
        ("--precision fp64", "--precision", "is not one of"),
        ("--batch 2000000000 --spatial 99999,99999", "--spatial", "a size that torch counts"),
    ],
)
def test_impossible_problems_are_refused(arguments, option, expected):
    line = refused("explain", *arguments.split())
    assert f"'{option}'" in line
    assert expected in line


@pytest.mark.parametrize(
    "arguments",
    [
        "--stride 2,1 --kernel-size 4,3 --padding 1,0 --output-padding 1,0 --dilation 1,2",
        "--spatial 70 --stride 2",
        "--batch 0",
        "--out-channels 0 --spatial= --num-groups 4",
        "--out-channels 0 --spatial 2,2,2,2 --layout nhwc",
        "--device cpu --groups 4 --num-groups 0",
        "--kernel-size 2147483647,1 --spatial 2147483647,1 --num-groups 1",
        "--in-channels 2147483647 --spatial 3,3",
        "--dilation 2147483647 --padding 2147483647",
    ],
)
def test_odd_but_possible_problems_are_explained(arguments):
    assert "kernel: " in invoke("explain", *arguments.split())


def test_values_for_each_axis_reach_the_problem():
    output = invoke("explain", "--spatial", "9,8", "--stride", "2,1", "--kernel-size", "4,3")
    assert "k4x3 s2x1" in output.splitlines()[0]


@pytest.mark.parametrize("norm", ["instance", "layer", "batch"])
def test_other_normalisations_are_explained(norm):
    name = "affine_norm" if norm == "batch" else f"{norm}_norm"
    for system in ([], ["--system", "system1"]):
        first = invoke("explain", "--norm", norm, *system).splitlines()[0]
        assert f"gelu -> {name} on " in first


def test_files_of_shapes_name_a_normalisation(tmp_path):
    path = tmp_path / "shapes.jsonl"
    lines = [{"norm": norm, "spatial": [6, 6]} for norm in ("group", "layer", "batch")]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = problems_of_file(path, torch.device("cpu"), "'FILE'")
    assert [each.norm.kind for each in found] == ["group", "layer", "affine"]


def test_files_of_shapes_name_the_weights_layout(tmp_path):
    path = tmp_path / "shapes.jsonl"
    path.write_text('\ufeff{"spatial": [6, 6]}\n{"spatial": [6, 6], "weight-layout": "nhwc"}\n')
    first, last = problems_of_file(path, torch.device("cpu"), "'FILE'")
    weight = torch.empty(64, 64, 3, 3)
    assert first.conv.weight_strides == weight.stride()
    lies_last = weight.to(memory_format=torch.channels_last)
    assert last.conv.weight_strides == lies_last.stride()


def test_a_processor_has_no_tf32():
    result = CliRunner().invoke(main, ["explain", "--device", "cpu", "--precision", "tf32"])
    assert result.exit_code == 2
    assert "got tf32, expected fp32, fp16 or bf16" in " ".join(result.output.split())


def test_what_is_given_overrides_the_system():
    first = invoke("explain", "--system", "system2", "--batch", "3").splitlines()[0]
    assert "conv_transpose3d 64->128 k3x3x3" in first
    assert "3x64x32x32x32" in first


COMMANDS = (["info"], ["list"], ["explain"], ["demo", "--quick"], ["bench", "--small"])


def failed(*arguments: str) -> str:
    """What a command prints that ends with exit code 1 and one line, not a traceback."""
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 1, result.output
    *before, line = result.output.splitlines()
    assert line.startswith("Error: ")
    assert "Error: " not in "".join(before)
    return result.output


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_unknown_forced_kernel_ends_in_one_line(force, command):
    force("nope")
    assert "no kernel or provider is called nope" in failed(*command)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_forced_kernel_without_a_name_ends_in_one_line(force, command):
    force(" , ")
    assert "FUSEDCONV_KERNEL: got ' , ', expected names of kernels" in failed(*command)


@pytest.mark.parametrize(
    "command",
    [["info"], ["list"], ["demo", "--quick"], ["bench", "--small"], ["tune"]],
    ids=lambda command: command[0],
)
def test_another_value_of_autotune_ends_in_one_line(monkeypatch, command):
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", "yes")
    line = failed(*command).splitlines()[-1]
    assert line == "Error: FUSEDCONV_AUTOTUNE: got 'yes', expected 0 or 1"


def test_an_unknown_instruction_set_ends_in_one_line():
    # In a process of its own: it is read once.
    result = python("-m", "fusedconv", "demo", "--quick", FUSEDCONV_INSTRUCTION_SET="nope")
    assert result.returncode == 1
    assert result.stderr.startswith('Error: FUSEDCONV_INSTRUCTION_SET: got "nope", expected one of')
    assert result.stderr.count("\n") == 1


def test_a_forced_kernel_that_does_not_serve_ends_in_one_line(force):
    force("cpu")
    line = failed("explain").splitlines()[-1]
    assert "no kernel among cpu serves" in line
    assert "runs on the processor, the input is on cuda" in line


@pytest.fixture
def broken_plugin(monkeypatch):
    class EntryPoint:
        name, value = "shaky", "shaky:register"

        def load(self):
            raise ImportError("no module\nnamed shaky")

    monkeypatch.setattr(registry, "_registry", None)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint()])


@pytest.mark.usefixtures("broken_plugin")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_broken_plugin_ends_in_one_line(command):
    assert "entry point 'shaky' (shaky:register)" in failed(*command).splitlines()[-1]


@pytest.mark.usefixtures("broken_plugin")
def test_info_says_what_it_can_beside_a_broken_plugin():
    output = failed("info")
    assert torch.__version__ in output
    assert "a plugin fails" in output


def test_the_package_is_a_command():
    for arguments, code, text in (
        (["list"], 0, "cpu_group_norm"),
        (["explain", "--stride", "0"], 2, "Usage: fusedconv explain"),
    ):
        result = python("-W", "error", "-m", "fusedconv", *arguments, COLUMNS="140")
        assert result.returncode == code, result.stderr
        assert text in result.stdout + result.stderr
        assert "Traceback" not in result.stderr


def test_demo_compares_with_eager():
    output = invoke("demo", "--quick")
    for title in ("ConvTranspose2d", "ConvTranspose3d", "GroupNorm"):
        assert title in output


def test_demo_shows_a_processor_work_enough_to_time():
    cpu = torch.device("cpu")
    rows = [(system.name, dtype) for system, dtype in _rows(cpu, quick=False)]
    assert rows == [
        ("system1", torch.float32),
        ("system1", torch.bfloat16),
        ("system2", torch.float32),
        ("system3", torch.float32),
    ]
    assert [system.name for system, _ in _rows(cpu, quick=True)] == list(SYSTEMS)
    for system in SYSTEMS.values():
        assert _shape(system, cpu, quick=False) == system.processor_input_shape
        assert _shape(system, cpu, quick=True) == system.small_input_shape


BENCH = [
    *("bench", "--small", "--workload", "system3", "--precision", "fp32", "--pass", "forward"),
    *("--seconds", "0", "--least", "2"),
]


def test_bench_writes_records(tmp_path):
    path = tmp_path / "new" / "figures.json"
    arguments = [*BENCH, "--contender", "fusedconv", "--output", str(path)]
    output = invoke(*arguments, "--layout", "nchw", "--commit", "abc")
    assert output.count("system3 forward fp32 nchw fusedconv: ") == 1
    written = json.loads(path.read_text())
    assert written["header"]["commit"] == "abc"
    assert len(written["records"]) == 1
    # Another layout is added, the same cell replaced.
    for _ in range(2):
        invoke(*arguments, "--layout", "nhwc")
    layouts = [record["layout"] for record in json.loads(path.read_text())["records"]]
    assert layouts == ["nchw", "nhwc"]
    assert [entry.name for entry in path.parent.iterdir()] == ["figures.json"]


def test_bench_takes_patterns_and_prints_summaries(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["bench", "--device", "cpu", "--small", "--workload", "group_norm_4x12x*"]
    arguments += ["--precision", "bf16", "--pass", "forward", "--layout", "nchw", "--least", "2"]
    arguments += ["--seconds", "0", "--contender", "fusedconv", "--contender", "eager"]
    output = invoke(*arguments, "--output", str(path), "--commit", "abc")
    assert output.count("fusedconv: ") == output.count("eager: ") - 1 == 4
    assert "forward over eager: geometric mean" in output
    (line,) = (each for each in output.splitlines() if " over eager" in each)
    assert "of 4 cells below 0.95x" in line
    # Nothing is left to measure; the summary is that of the file.
    output = invoke(*arguments, "--output", str(path), "--commit", "abc", "--resume")
    assert output.splitlines()[0] == line


@pytest.mark.parametrize(
    ("field", "other"), [("device", "NVIDIA H200"), ("threads", 512), ("torch", "1.0")]
)
@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resume"])
def test_bench_adds_to_no_records_of_another_machine(tmp_path, field, other, resume):
    path = tmp_path / "figures.json"
    arguments = [*BENCH, "--contender", "eager", "--layout", "nchw", "--device", "cpu"]
    arguments += ["--output", str(path), "--commit", "abc"]
    invoke(*arguments)
    content = json.loads(path.read_text())
    here, content["header"][field] = content["header"][field], other
    path.write_text(json.dumps(content))
    line = refused(*arguments, *(["--resume"] if resume else []))
    assert "'--output': got " in line
    assert f"measured with {field} {other}; expected one measured with {field} {here}" in line
    assert json.loads(path.read_text()) == content


def test_bench_refuses_to_resume_nothing():
    assert "'--resume'" in refused(*BENCH, "--resume")


def test_bench_refuses_ordinals_of_processors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "'--devices'" in refused(*BENCH, "--device", "cpu", "--devices", "0,1")


def test_bench_refuses_contenders_that_take_no_part():
    line = refused(*BENCH, "--contender", "rewrite", "--contender", "eager_cudnn_benchmark")
    assert "'--contender': got rewrite, eager_cudnn_benchmark, expected one at least" in line


@pytest.mark.parametrize("kernels", [[], ["--kernels", "all"]], ids=["contenders", "kernels"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite layers --precision tf32", "'--precision': got tf32, expected another one"),
        ("--workload hifigan8 --layout nhwc", "'--layout': got nhwc, expected nchw"),
    ],
)
def test_bench_says_what_leaves_no_cell(arguments, message, kernels):
    assert message in refused("bench", "--device", "cpu", "--small", *arguments.split(), *kernels)


@pytest.fixture
def measures_nothing(monkeypatch):
    def run(*arguments, **settings):
        raise AssertionError("measured")

    monkeypatch.setattr(benchmark, "run", run)


@pytest.mark.usefixtures("measures_nothing")
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--least", "0", "0 is not in the range"),
        ("--seconds", "-1", "-1.0 is not in the range"),
        ("--seconds", "nan", "got nan, expected a number"),
        ("--devices", "0,0", "expected different ordinals"),
        ("--devices", "99", "expected different ordinals"),
        ("--workload", "system4", "got 'system4', expected a workload or a pattern"),
        ("--output", "{folder}", "expected a file that can be written"),
        ("--output", "{folder}/taken/figures.json", "expected a file that can be written"),
        ("--output", "{folder}/taken", "expected a file of this benchmark's records"),
    ],
)
def test_bench_refuses_before_it_measures(tmp_path, option, value, expected):
    (tmp_path / "taken").write_text("{}")
    line = refused(*BENCH, option, value.format(folder=tmp_path))
    assert f"'{option}'" in line
    assert expected in line
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_bench_adds_to_no_records_that_its_summary_could_not_read(tmp_path):
    path = tmp_path / "figures.json"
    record = {name: value for name, value in RECORD.items() if name != "median_ms"}
    path.write_text(json.dumps({"header": {}, "records": [{**record, "shape": None}]}))
    line = refused(*BENCH, "--output", str(path))
    assert "expected a file of this benchmark's records" in line


RECORD = {
    **benchmark.Cell("system3", "fp32", "nchw", "forward").fields(),
    **dict(contender="eager", median_ms=2.0, p10_ms=1.0, p90_ms=3.0, floor_ms=1.0),
    **dict(error_fp64=1e-7, kernel="torch"),
}


def test_bench_shows_a_bar_on_a_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140)
    cell = benchmark.Cell.of(RECORD)
    with progress.observer(console, record_line) as observer:
        observer.planned(4)
        observer.began(f"{cell.title} eager")
        observer.measured(RECORD, 0.25)
        observer.began(f"{cell.title} compile")
    text = screen.getvalue()
    assert "system3 forward fp32 nchw eager: 2.0000 ms (1.0000 to 3.0000), 50% of the floor" in text
    behind = text.split("eager: 2.0000 ms")[1]
    assert "system3 forward fp32 nchw compile" in behind
    assert "1/4" in behind


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ", torch"),
        ({"chosen_by": "cost"}, ", torch"),
        ({"chosen_by": "tuned"}, ", torch (chosen by: tuned)"),
    ],
)
def test_bench_says_what_was_not_chosen_by_estimates(fields, end):
    assert record_line({**RECORD, **fields}).endswith(end)


def test_bench_writes_lines_elsewhere(capsys):
    with progress.observer(Console(file=io.StringIO()), record_line) as observer:
        observer.planned(4)
        observer.began("system3")
        observer.measured(RECORD, 0.25)
        observer.measured({**RECORD, "median_ms": None, "error": "OSError: it broke"}, 0.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("system3 forward fp32 nchw eager: 2.0000 ms")
    assert second == "system3 forward fp32 nchw eager: OSError: it broke"
