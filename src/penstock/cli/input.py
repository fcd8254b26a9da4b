"""What verbs read: a file by its name, or ``-``, standard input, whose beginning tells what kind of
file it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.base.errors import FileError
from penstock.base.values import MOST_FILE_BYTES, read_stream, read_text

if TYPE_CHECKING:
    from penstock.core.cluster import Cluster

STANDARD_INPUT = "-"
_TEXT, _TAKEN = "penstock.standard_input", "penstock.standard_input_of"


class InputFile(click.Path):
    """The name of a file to read, or ``-`` for standard input, which one parameter may have."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a second parameter that would read standard input."""
        name = super().convert(value, param, ctx)
        take(str(name), ctx)
        return name


def take(name: str, ctx: click.Context | None) -> None:
    """Note that a parameter reads standard input, if its value is ``-``.

    Raises:
        UsageError: another one does so already.
    """
    if name != STANDARD_INPUT or ctx is None:
        return
    if ctx.meta.get(_TAKEN):
        raise click.UsageError(
            "- is standard input, which can be read once; give the name of a file for the others",
            ctx,
        )
    ctx.meta[_TAKEN] = True


def title_of(name: str) -> str:
    """What errors call it."""
    return "standard input" if name == STANDARD_INPUT else name


def text_of(name: str, most_bytes: int = MOST_FILE_BYTES) -> str:
    """The text of a file or of standard input, which is read once and kept.

    Raises:
        FileError: it cannot be read, or nothing comes from standard input.
    """
    if name != STANDARD_INPUT:
        return read_text(name, most_bytes)
    kept = click.get_current_context().meta
    if _TEXT not in kept:
        kept[_TEXT] = read_stream(sys.stdin.buffer, title_of(name), most_bytes)
        if not kept[_TEXT].strip():
            raise FileError("standard input is empty; pipe a file into it, or give a file's name")
    return str(kept[_TEXT])


def suffix_of(name: str, otherwise: str) -> str:
    """How a file's name ends, in small letters. Standard input has no name: what begins as JSON
    does is ``.json``, anything else ``otherwise``."""
    if name != STANDARD_INPUT:
        return Path(name).suffix.lower()
    return ".json" if text_of(name).lstrip().startswith("{") else otherwise


def stem_of(name: str) -> str:
    """What a value that bears no name is called after its file."""
    return title_of(name) if name == STANDARD_INPUT else Path(name).stem


def load_cluster(name: str) -> Cluster:
    """The cluster in a file (``.toml`` for what people write, anything else is JSON).

    Raises:
        FileError: it holds something else.
    """
    from penstock.core.cluster import Cluster

    if name != STANDARD_INPUT:
        return Cluster.load(name)
    read = Cluster.from_json if suffix_of(name, ".toml") == ".json" else Cluster.from_toml
    return read(text_of(name), where=title_of(name))
