"""Programs of the CUDA providers as they are run. No GPU."""

from __future__ import annotations

import torch

from fusedconv.kernels.cuda import program


class Recorded:
    """Stands for a compiled program."""

    workspace_bytes = 0

    def run(self, addresses, workspace, stream):
        self.ran = addresses, workspace, stream


def test_a_run_that_the_profiler_records_ends_replays(monkeypatch):
    stops = []
    monkeypatch.setattr(program, "_stop_replays", lambda: stops.append(True))
    monkeypatch.setattr(program, "raw_stream", lambda device: 7)
    tensor = torch.ones(3)
    recorded = Recorded()
    program.run_program(recorded, torch.device("cuda", 0), [None, tensor])
    assert recorded.ran == ([0, tensor.data_ptr()], 0, 7)
    assert not stops
    with torch.autograd.profiler.profile():
        program.run_program(recorded, torch.device("cuda", 0), [None, tensor])
    assert stops == [True]
