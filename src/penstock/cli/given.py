"""Which options somebody gave, so that one which changes nothing is refused and not passed over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.core import ParameterSource

from penstock.errors import InputError

SHAPE = ("ranks", "microbatches")
FIGURES = (".svg", ".pdf", ".png")


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


def check_source(source: str) -> None:
    """Refuse what only schedules by name take, if ``source`` is a file that says it itself.

    Raises:
        InputError: the number of ranks or of microbatches was given, or costs beside a ``.json``.
    """
    suffix = Path(source).suffix.lower()
    if suffix == ".csv":
        refuse_useless(SHAPE, f"{source} says its ranks and microbatches itself")
    elif suffix == ".json":
        names, words = (*SHAPE, "costs"), "ranks, microbatches and costs"
        refuse_useless(names, f"{source} says its {words} itself")


def check_width(output: str | None) -> None:
    """Refuse a width of what is no figure."""
    if output is None or (output != "-" and Path(output).suffix.lower() not in FIGURES):
        refuse_useless(
            ["width"], "only figures have a width, and what is written is none (.svg, .pdf or .png)"
        )
