"""Which GroupNorm kernels of the GPU serve which problem, which needs no GPU."""

from __future__ import annotations

import pytest
import torch
from problems import problem
from reference import channels_last
from test_gpu_group_norm import CASES, FLOOR, KERNELS, LARGE_CASES, serves, with_layouts

import fusedconv
from fusedconv.problem import NormGeometry, layout_of
from fusedconv.registry import registry

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_serve_what_their_conditions_say(name, architecture):
    (kernel,) = (kernel for kernel in registry().kernels() if kernel.name == name)
    answers = []
    for shape, groups, layout in with_layouts(CASES + LARGE_CASES):
        for dtype in FLOOR:
            x = torch.empty(shape, device="meta", dtype=dtype)
            if layout == "nhwc":
                x = channels_last(x)
            asked = problem(
                device="cuda",
                architecture=architecture,
                multiprocessors=132,
                dtype=dtype,
                output_dtype=dtype,
                layout=layout_of(shape, x.stride()),
                batch=shape[0],
                channels=shape[1],
                spatial=shape[2:],
                activation="identity",
                conv=None,
                norm=NormGeometry(groups, 1e-5, weight=False, bias=False, affine_dtype=None),
            )
            expected = serves(
                name,
                shape,
                groups,
                dtype,
                not x.is_contiguous(),
                capability=divmod(architecture, 10),
                multiprocessors=132,
            )
            support = kernel.supports(asked)
            assert bool(support) == expected, (shape, groups, dtype, layout, support.reason)
            answers.append(expected)
    if name == "groupnorm_streamed" and architecture < 90:
        assert not any(answers)
    else:
        assert answers.count(True) >= 30
