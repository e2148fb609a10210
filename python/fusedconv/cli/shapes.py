"""Files of shapes and of recorded problems, a line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch

from fusedconv.cli.explain import explain, problems
from fusedconv.describing import problem_of
from fusedconv.hypothetical import checked
from fusedconv.problem import Problem

#: Options of ``explain`` that are not a problem's: the command that reads the file has a device.
_NO_SHAPES = ("help", "device", "arch")
#: Flags of ``explain`` without an option that unsets them.
_FLAGS = [
    option.removeprefix("--")
    for parameter in explain.params
    if isinstance(parameter, click.Option) and parameter.is_flag and not parameter.secondary_opts
    for option in parameter.opts
]


def _options(fields: dict[str, Any]) -> list[str]:
    """A line of a file of shapes, as arguments of ``explain``."""
    arguments = []
    for name, value in fields.items():
        if name in _NO_SHAPES:
            raise ValueError(f"got {name}, expected what a problem consists of")
        if value is None:
            raise ValueError(f"{name!r}: got null, expected a value")
        if value is True:
            arguments.append(f"--{name}")
        elif value is False:
            arguments += [] if name in _FLAGS else [f"--no-{name}"]
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", ",".join(map(str, values))]
    return arguments


def _recorded(fields: dict[str, Any], device: torch.device) -> Problem:
    """A line of ``fusedconv.record_problems``."""
    expected = {"summary", "device", "problem"}
    if set(fields) != expected:
        names = ", ".join(sorted(expected))
        raise ValueError(f"got the fields {', '.join(map(repr, fields))}, expected {names}")
    problem = problem_of(fields["problem"])
    if fields["device"] != device.type:
        raise ValueError(
            f"device: got {fields['device']!r}, where it was recorded, expected {device.type!r}"
        )
    return checked(problem, device.type)


def _lines(path: Path, hint: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint=hint) from error


def problems_of_file(path: Path, device: torch.device, hint: str) -> list[Problem]:
    """The different problems that a file describes on a device; each line is a JSON object of
    ``explain``'s options but those of the device, or one that ``fusedconv.record_problems`` has
    written. Raises click.BadParameter where one is not, or where there is none, for the parameter
    that ``hint`` names."""
    found: dict[Problem, None] = {}
    for number, line in enumerate(_lines(path, hint), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(f"got {fields!r}, expected an object")
            if "problem" in fields:
                found[_recorded(fields, device)] = None
                continue
            arguments = [*_options(fields), "--device", device.type]
            with explain.make_context("explain", arguments) as context:
                found |= dict.fromkeys(problems(context, **context.params))
        except RecursionError:
            message: object = "got too many brackets within brackets, expected an object"
            raise click.BadParameter(f"line {number}: {message}", param_hint=hint) from None
        except (ValueError, TypeError, click.UsageError) as error:
            message = error.format_message() if isinstance(error, click.UsageError) else error
            raise click.BadParameter(f"line {number}: {message}", param_hint=hint) from error
    if not found:
        raise click.BadParameter(f"{path}: got no line, expected one a problem", param_hint=hint)
    return list(found)
