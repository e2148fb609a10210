"""The command ``fusedconv``: info, list, explain, demo, bench, plot, tune, cache."""

from __future__ import annotations

import click

import fusedconv
from fusedconv.cli.bench import bench
from fusedconv.cli.demo import demo
from fusedconv.cli.explain import explain
from fusedconv.cli.info import info, list_kernels
from fusedconv.cli.options import Commands
from fusedconv.cli.plot import plot
from fusedconv.cli.tune import cache, tune


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fusedconv.__version__)
def main() -> None:
    """Transposed convolution, activation and GroupNorm in fused kernels, for PyTorch."""


for _command in (info, list_kernels, explain, demo, bench, plot, tune, cache):
    main.add_command(_command)
