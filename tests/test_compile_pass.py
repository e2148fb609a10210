"""The pass over graphs of torch.compile and torch.export, and the backend that it is part of."""

from __future__ import annotations

import logging

import pytest
import torch
from converting import CALLS, CHAINS, Joined, assert_same, calls, converted
from reference import TORCH_SCRIPTS

import fusedconv
from fusedconv.conversion.graphs import rewrite

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def x():
    return torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))


def test_the_pass_over_an_exported_program(x, caplog):
    caplog.set_level(logging.DEBUG, logger="fusedconv")
    model = converted(Joined().eval())[1]
    program = torch.export.export(model, (x,)).module()
    assert fusedconv.compile_pass(program) is program
    chains = [r.getMessage() for r in caplog.records if "compile_pass" in r.getMessage()]
    assert chains == [f"compile_pass: {chain}" for chain in CHAINS]
    assert_same(program, model, x)
    assert calls(program, x) == CALLS
    assert rewrite(program).replaced == []


def test_the_pass_in_front_of_a_compiler(x):
    model = converted(Joined().eval())[1]
    compiled = torch.compile(model, backend=fusedconv.compile_backend("aot_eager"), fullgraph=True)
    assert_same(compiled, model, x)
    graphs = []

    def seen(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fusedconv.compile_backend(seen), dynamic=True)
    for shape in ((2, 4, 3, 5), (5, 4, 6, 7), (3, 4, 2, 9)):
        with torch.no_grad():
            torch.testing.assert_close(compiled(torch.ones(shape)), model(torch.ones(shape)))
    assert len(graphs) == 1
    names = [getattr(node.target, "__name__", "") for node in graphs[0].graph.nodes]
    assert names.count("conv_transpose_act_norm") == 4
    assert names.count("group_norm") == 2
    assert not {"conv_transpose2d", "batch_norm", "gelu"} & set(names)


def test_the_pass_joins_calls_of_ours(x):
    """Converted modules are operators of ours in a graph, whose stages come from around them."""
    model, original = converted(Joined().eval())
    compiled = torch.compile(model, backend=fusedconv.compile_backend("eager"), fullgraph=True)
    assert calls(compiled, x) == CALLS
    assert_same(compiled, original, x)


@TORCH_SCRIPTS
def test_the_pass_in_front_of_inductor(x):
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor has no C++ compiler here: {error}")
    model = converted(Joined().eval())[1]
    compiled = torch.compile(
        model, backend=fusedconv.compile_backend(), options={"max_fusion_size": 8}
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_nodes_without_a_known_tensor_stay():
    graph_module = torch.fx.symbolic_trace(Joined())
    code = graph_module.code
    assert fusedconv.compile_pass(graph_module).code == code


def test_what_is_no_graph_and_no_backend_is_refused():
    with pytest.raises(TypeError, match=r"(?s)graph_module: got .*, expected a GraphModule"):
        fusedconv.compile_pass(Joined())
    with pytest.raises(TypeError, match=r"inner: got 3, expected a backend's name or a callable"):
        fusedconv.compile_backend(3)
    with pytest.raises(torch._dynamo.exc.InvalidBackend):
        fusedconv.compile_backend("nothing")
