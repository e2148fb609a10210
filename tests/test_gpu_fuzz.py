"""Random transposed convolutions by whatever kernel is chosen for each, against fp64."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from gpu_checks import fused_against_fp64, random_problem

from fusedconv.benchmark import DTYPES
from fusedconv.explaining import explain_problem
from fusedconv.problem import ForwardProblem
from fusedconv.recording import record

pytestmark = pytest.mark.gpu

#: Of all problems, that kernels of the package serve.
LEAST_SERVED = 0.99
#: Beside that of a single row's tests: over so many problems chance parts eager's error and ours.
FLOORS = {"fp32": 1e-7, "tf32": 1e-5}
#: Of an output: over fewer chance parts eager's error and ours.
FEWEST_VALUES = 1000


@pytest.mark.parametrize("precision", DTYPES)
def test_random_problems(precision, fuzz_problems, monkeypatch, record_property):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    generator = random.Random(f"any {precision}")
    served: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for number in range(fuzz_problems):
        case = random_problem(precision, generator)
        while case["batch"] * case["values"] < FEWEST_VALUES:
            case = random_problem(precision, generator)
        torch.manual_seed(number)
        beyond: AssertionError | None = None
        with record.recording() as calls:
            try:
                floor = FLOORS.get(precision, 0.0)
                assert fused_against_fp64(case, DTYPES[precision], precision, floor=floor)
            except AssertionError as error:
                beyond = error
        explained = [explain_problem(*call) for call in calls]
        (convolution,) = (
            e for e in explained if isinstance(e.problem, ForwardProblem) and e.problem.conv
        )
        served[convolution.provider] += 1
        # What torch's operators leave of an error is not ours.
        if beyond is not None and convolution.provider != "torch":
            raise beyond
        if convolution.provider == "torch":
            reasons[str(convolution)] += 1
    record_property("served", dict(served))
    print(f"{precision}: {fuzz_problems} problems, served by {dict(served)}")
    for reason in list(reasons)[:3]:
        print(reason)
    assert served["torch"] <= (1 - LEAST_SERVED) * fuzz_problems, dict(served)
