"""Where a verb writes: a file in a folder that is there, or ``-``, standard output.

Where nobody could write is said before any work is done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from penstock.base.errors import InputError, printable
from penstock.cli import show

STANDARD_OUTPUT = "-"
BOTH_TO_STANDARD_OUTPUT = "-o - and --json would both go to standard output; leave one out"


class OutputFile(click.Path):
    """The name of a file to write, or ``-`` for standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a name that cannot be written."""
        name = str(super().convert(value, param, ctx))
        if name == STANDARD_OUTPUT:
            if ctx is not None and ctx.params.get("as_json"):
                raise click.UsageError(BOTH_TO_STANDARD_OUTPUT, ctx)
            return name
        _check_parent(self, name, param, ctx)
        if os.path.isdir(name):
            self.fail(f"{name} is a folder; give the name of a file", param, ctx)
        return name


class OutputFolder(click.Path):
    """The name of a folder, which is made inside one that is there."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, exists=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a name that cannot be a folder's."""
        name = str(super().convert(value, param, ctx))
        if name == STANDARD_OUTPUT:
            self.fail("what is written is a folder, which standard output cannot be", param, ctx)
        _check_parent(self, name, param, ctx)
        if os.path.isfile(name):
            self.fail(f"{name} is a file; give the name of a folder", param, ctx)
        return name


class OutputPlace(click.Path):
    """The name of a file or folder that is made by something that standard output cannot hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a name in a folder that is not there."""
        name = str(super().convert(value, param, ctx))
        if name == STANDARD_OUTPUT:
            self.fail("what is written is no text; give the name of a file", param, ctx)
        _check_parent(self, name, param, ctx)
        return name


def _check_parent(
    kind: click.ParamType[Any],
    name: str,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> None:
    # os.path.isdir takes any name; Path.is_dir raises for one that is too long.
    parent = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(parent):
        kind.fail(f"there is no folder {os.path.dirname(name)}; make it first", param, ctx)


def check_apart(**outputs: str | None) -> None:
    """Refuse two outputs that go to one place, of which one would be lost or both be mixed.

    Args:
        outputs: by the option's name without its dashes, as given.

    Raises:
        InputError: two of them are the same file, or both standard output.
    """
    places: dict[str, str] = {}
    for option, output in outputs.items():
        if output is None:
            continue
        place = output if output == STANDARD_OUTPUT else os.path.realpath(output)
        if place in places:
            raise InputError(
                f"--{places[place]} and --{option} would both go to "
                f"{'standard output' if output == STANDARD_OUTPUT else output}; give one of them "
                "another name"
            )
        places[place] = option


def write(output: str | None, suffix: str, save: Callable[[str], object]) -> None:
    """Write what a verb has made, and say so; print it where its place is ``-``.

    Args:
        output: as given; ``None`` if nothing is to be written.
        suffix: what is written to standard output, as the end of a file's name: ``".svg"``.
        save: writes it to a path.
    """
    if output is None:
        return
    if output != STANDARD_OUTPUT:
        save(output)
        show.say(f"wrote {output}")
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"output{suffix}")
        save(str(path))
        content = path.read_bytes()
    # Programs get every byte; a terminal gets no command that a name in it may hold.
    click.echo(printable(content.decode(errors="replace")) if _to_terminal() else content, nl=False)


def _to_terminal() -> bool:
    return bool(getattr(sys.stdout, "isatty", bool)())
