"""Which options somebody gave, so that one which changes nothing is refused and not passed over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from penstock.base.errors import InputError
from penstock.cli.input import suffix_of, title_of

_SHAPE = ("ranks", "microbatches")
_OWN = {".csv": _SHAPE, ".json": (*_SHAPE, "costs")}
_FIGURES = (".svg", ".pdf", ".png")


def is_given(name: str) -> bool:
    """Whether the parameter of the running verb was given, rather than left at its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def refuse_useless(names: Iterable[str], why: str) -> None:
    """Refuse options that were given but would change nothing.

    Args:
        names: of the running verb's parameters.
        why: they would not, as the first half of a sentence.

    Raises:
        InputError: one or several of them were given.
    """
    context = click.get_current_context()
    asked = set(names)
    useless = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name in asked and is_given(parameter.name)
    ]
    if useless:
        raise InputError(f"{why}; leave {' and '.join(useless)} out")


def check_source(source: str, of_use: Collection[str] = ()) -> None:
    """Refuse what only schedules by name take, if ``source`` is a file that says it itself.

    Args:
        of_use: what is not refused beside a plan or a timeline.

    Raises:
        InputError: the number of ranks or of microbatches was given, or costs beside a ``.json``.
    """
    own = _said_by(source)
    if own:
        said = f"{', '.join(own[:-1])} and {own[-1]}"
        refuse_useless(set(own).difference(of_use), f"{title_of(source)} says its {said} itself")


def check_sources(sources: Sequence[str]) -> None:
    """Refuse what only schedules by name take, if all sources are files that say it themselves."""
    for name in (*_SHAPE, "costs"):
        if all(name in _said_by(source) for source in sources):
            refuse_useless([name], f"files say their {name} themselves")


def _said_by(source: str) -> tuple[str, ...]:
    """Which parameters of schedules a file holds."""
    return _OWN.get(suffix_of(source, ".csv"), ())


def check_width(output: str | None) -> None:
    """Refuse a width of what is no figure."""
    if output is None or (output != "-" and Path(output).suffix.lower() not in _FIGURES):
        refuse_useless(
            ["width"], "only figures have a width, and what is written is none (.svg, .pdf or .png)"
        )
