"""What the commands share: the console, options of integers, errors that name options."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

from fusedconv import benchmark, tuning
from fusedconv.device import instruction_set
from fusedconv.errors import KernelError, NoKernelError, PluginError
from fusedconv.registry import registry
from fusedconv.selection import forced_kernels

#: What extents and channels are counted to.
LARGEST = 2**31 - 1


def console() -> Console:
    return Console(width=None if Console().is_terminal else 140)


def one_line(message: object) -> str:
    """A message, its further lines joined to the first one."""
    lines = [line.strip() for line in str(message).splitlines()]
    return " ".join((lines[0], "; ".join(dict.fromkeys(lines[1:])))).strip() if lines else ""


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings are shown without the place in the source that warns."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {one_line(message)}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


class Commands(click.Group):
    """What the machine or its settings refuse ends in a line, not in a traceback, and warnings are
    lines too."""

    def invoke(self, context: click.Context) -> Any:
        try:
            with _warnings_as_lines():
                return super().invoke(context)
        except (NoKernelError, PluginError, KernelError, benchmark.ContenderError) as error:
            raise click.ClickException(one_line(error)) from error


def check_settings() -> None:
    """PluginError where a plugin fails, NoKernelError where FUSEDCONV_KERNEL names what is not
    there, ClickException where FUSEDCONV_AUTOTUNE or FUSEDCONV_INSTRUCTION_SET has no such value.
    """
    kernels, forced = registry(), forced_kernels()
    if forced is not None:
        kernels.forced_names(forced)
    try:
        tuning.is_active()
        instruction_set()
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def is_given(context: click.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by default."""
    return context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE


def integers(
    context: click.Context, parameter: click.Parameter, value: str, least: int
) -> tuple[int, ...]:
    try:
        result = tuple(int(part) for part in value.split(",") if value.strip())
    except ValueError:
        result = None
    if result is None or any(not least <= part <= LARGEST for part in result):
        raise click.BadParameter(
            f"got {value!r}, expected integers from {least} to {LARGEST} between commas"
        )
    return result


def axes(name: str, least: int, default: str) -> Callable[[Any], Any]:
    """An option of integers between commas, of at least ``least`` each."""
    return click.option(
        name,
        default=default,
        show_default=True,
        metavar="INTEGERS",
        callback=functools.partial(integers, least=least),
    )


#: The options behind the arguments that messages name.
_OPTIONS = {
    "input": "spatial",
    "weight": "kernel-size",
    "contenders": "contender",
    "precisions": "precision",
    "layouts": "layout",
}


@contextmanager
def naming_options() -> Iterator[None]:
    """Errors of arguments as errors of the options that gave them."""
    try:
        yield
    except (ValueError, TypeError) as error:
        name, _, message = str(error).partition(": ")
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise click.BadParameter(message, param_hint=f"'--{option}'") from error
