"""``fusedconv plot``: figures of the benchmark's records."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from fusedconv.benchmark import plots


@click.command()
@click.argument(
    "records",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(tuple(plots.KINDS)),
    multiple=True,
    help="By default every kind that the records have figures for.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    show_default="the working directory",
    help="The folder of the figures.",
)
def plot(records: tuple[Path, ...], kinds: tuple[str, ...], output: Path) -> None:
    """Draws the figures of files that `fusedconv bench --output` wrote, as PNG and SVG.

    Of contenders: bars next to peers, with the floor, and rooflines. Of kernels (`bench
    --kernels`): rooflines, a map of which one wins where, and the regret of estimates.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException('matplotlib is missing: pip install "fusedconv[plot]"')
    stems = [path.stem for path in records]
    if len(set(stems)) < len(stems):
        raise click.BadParameter(
            "got files of one name, which figures have too; expected different names",
            param_hint="'RECORDS'",
        )
    for path in records:
        try:
            content = plots.load(path)
            output.mkdir(parents=True, exist_ok=True)
        except ValueError as error:
            message = str(error).removeprefix("output: ")
            raise click.BadParameter(message, param_hint="'RECORDS'") from error
        except OSError as error:
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        drawn = []
        for kind in kinds or plots.KINDS:
            try:
                figure = plots.KINDS[kind](content)
            except plots.NothingToPlotError as error:
                if kinds:
                    message = f"{path}: {error}"
                    raise click.BadParameter(message, param_hint="'RECORDS'") from error
                continue
            try:
                drawn += plots.save(figure, output, f"{path.stem}-{kind}")
            except OSError as error:
                raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        if not drawn:
            raise click.BadParameter(f"{path}: got nothing to plot", param_hint="'RECORDS'")
        for each in drawn:
            click.echo(str(each))
