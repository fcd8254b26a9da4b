"""Options that several verbs share, and the values behind them: costs, and names in upper or lower
case that a shell completes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.base.errors import FileError, InputError
from penstock.base.units import to_bytes
from penstock.base.values import Value
from penstock.cli.input import STANDARD_INPUT, take, text_of, title_of
from penstock.cli.output import (
    BOTH_TO_STANDARD_OUTPUT,
    STANDARD_OUTPUT,
    OutputFile,
    OutputFolder,
)
from penstock.core.timing.costs import Costs
from penstock.core.versions import POLICIES, Policy

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class ScheduleName(click.ParamType[str]):
    """A schedule's name, with its options behind a colon: ``1F1B`` is ``1f1b``. What is none is
    left to whoever reads it."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as families have it."""
        from penstock.core.schedule.families import FAMILIES

        family, colon, options = str(value).partition(":")
        lower = family.lower()
        return f"{lower}{colon}{options}" if lower in FAMILIES else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The families whose names begin so."""
        from penstock.core.schedule import families

        return _beginning_with(incomplete, families.names())


class Source(ScheduleName):
    """A schedule's name, a file that can be drawn, or ``-``, such a file on standard input."""

    name = "source"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as families have it, or that of a file."""
        take(str(value), ctx)
        return super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The families whose names begin so, and files, which the shell knows."""
        from click.shell_completion import CompletionItem

        named = super().shell_complete(ctx, param, incomplete)
        return [*named, CompletionItem(incomplete, type="file")]


class PolicyName(click.ParamType[str]):
    """A weight-version policy's name, with its fields behind a colon."""

    name = "policy"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The policies whose names begin so."""
        return _beginning_with(incomplete, POLICIES)


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.startswith(incomplete.lower())]


Verb = TypeVar("Verb", bound=Callable[..., Any])

_COST_NAMES = ("forward", "backward_input", "backward_weight", "hop")


class CostsFile(Value, frozen=True):
    """The fields of ``Costs`` as a file: each a number, or a list with one per stage."""

    forward: float | list[float] = 1.0
    backward_input: float | list[float] = 1.0
    backward_weight: float | list[float] = 1.0
    hop: float | list[float] = 0.0
    update: float | list[float] = 0.0
    recompute: float | list[float] | None = None
    reduce: float | list[float] = 0.0

    def costs(self, where: str) -> Costs:
        """The costs that the file's fields say.

        Raises:
            FileError: a cost is negative or not finite; ``where`` is named.
        """
        try:
            return Costs(**{name: getattr(self, name) for name in self.__struct_fields__})
        except InputError as error:
            raise FileError(f"{where}: {error}") from None


class CostsType(click.ParamType[Costs]):
    """``F,I,W,hop`` as ``Costs``, where the hop may be left out; or a file with fields of it."""

    name = "F,I,W,hop|FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Turn the option's text into ``Costs``."""
        if isinstance(value, Costs):
            return value
        name = str(value)
        if name == STANDARD_INPUT or Path(name).suffix.lower() == ".json":
            take(name, ctx)
            where = title_of(name)
            return CostsFile.from_json(text_of(name), where=where).costs(where)
        parts = str(value).split(",")
        if len(parts) not in (3, 4):
            self.fail(f"{value!r} has {len(parts)} numbers; write F,I,W or F,I,W,hop", param, ctx)
        try:
            numbers = [float(part) for part in parts]
            given: dict[str, Any] = dict(zip(_COST_NAMES, numbers, strict=False))
            return Costs(**given)
        except InputError as error:
            self.fail(str(error), param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; write F,I,W or F,I,W,hop", param, ctx)


def costs_option(verb: Verb) -> Verb:
    """``--costs F,I,W,hop``."""
    return click.option(
        "--costs",
        type=CostsType(),
        default=Costs(),
        show_default="1,1,1,0",
        help="Time of a forward, an input gradient and a weight gradient of a whole rank's layers, "
        "and of a hop between ranks. Where a rank has several stages, each takes its share. Or a "
        ".json file (-: standard input) with fields of Costs; a list gives a number per stage.",
    )(verb)


def count_option(
    *names: str, help: str, least: int = 1, default: int | None = None
) -> Callable[[Verb], Verb]:
    """An option that takes a whole number."""
    return click.option(
        *names, type=click.IntRange(min=least), default=default,
        show_default=default is not None, help=help,
    )  # fmt: skip


def amount_option(
    *names: str, help: str, metavar: str | None = None, default: float | None = None
) -> Callable[[Verb], Verb]:
    """An option that takes a number above 0."""
    return click.option(
        *names, type=click.FloatRange(min=0, min_open=True), metavar=metavar, default=default,
        show_default=default is not None, help=help,
    )  # fmt: skip


def choice_option(
    *names: str, among: Iterable[str], help: str, default: str | None = None
) -> Callable[[Verb], Verb]:
    """An option that takes a word of several."""
    return click.option(
        *names, type=click.Choice([*among]), default=default, show_default=default is not None,
        help=help,
    )  # fmt: skip


def arrivals_option(verb: Verb) -> Verb:
    """``--arrivals RATE``."""
    return amount_option(
        "--arrivals",
        help="How many microbatches (frames) a live source gives per unit of time; by default all "
        "are there at the beginning, or, with partime, as many come as are taken.",
    )(verb)  # fmt: skip


def ranks_option(default: int | None) -> Callable[[Verb], Verb]:
    """``-p/--ranks``."""
    return count_option("-p", "--ranks", default=default, help="Number of ranks (devices).")


def microbatches_option(default: int | None) -> Callable[[Verb], Verb]:
    """``-m/--microbatches``."""
    return count_option(
        "-m", "--microbatches", default=default, help="Number of microbatches per minibatch."
    )


def _parse_json(context: click.Context, _: click.Parameter, as_json: bool) -> bool:
    if as_json and context.params.get("output") == STANDARD_OUTPUT:
        raise click.UsageError(BOTH_TO_STANDARD_OUTPUT, context)
    return as_json


def json_option(verb: Verb) -> Verb:
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, callback=_parse_json, help="Print the result as JSON."
    )(verb)


def verbose_option(details: str) -> Callable[[Verb], Verb]:
    """``-v/--verbose``."""
    return click.option("-v", "--verbose", is_flag=True, help=f"Also say {details}")


def output_option(meaning: str) -> Callable[[Verb], Verb]:
    """``-o/--output``."""
    return click.option("-o", "--output", type=OutputFile(), help=f"{meaning}  -: standard output.")


def folder_option(verb: Verb) -> Verb:
    """``-o/--output`` of a report."""
    return click.option(
        "-o", "--output", type=OutputFolder(), default="penstock-report", show_default=True,
        help="Report folder.",
    )(verb)  # fmt: skip


def width_option(verb: Verb) -> Verb:
    """``--width``."""
    return click.option(
        "--width", type=click.FloatRange(min=480), metavar="PIXELS",
        help="Of the figure, as 800 for a paper's column: of what does not fit, the beginning and "
        "the end are drawn. Default: as wide as the labels need.",
    )(verb)  # fmt: skip


def steps_option(verb: Verb) -> Verb:
    """``--steps``."""
    return count_option("--steps", default=40, help="Minibatches to train.")(verb)


def versions_options(verb: Verb) -> Verb:
    """``--versions`` and ``--policy``."""
    verb = click.option(
        "--policy", type=click.Choice(list(POLICIES), case_sensitive=False),
        help="With which policy passes read versions, on a schedule that never flushes; by default "
        "the schedule's own. Shows versions.",
    )(verb)  # fmt: skip
    return click.option(
        "--versions", is_flag=True,
        help="Also show which version of its stage's weights each op reads.",
    )(verb)  # fmt: skip


def parse_bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """A size with its unit."""
    try:
        return None if text is None else to_bytes(f"{text}B" if text.isdigit() else text)
    except InputError as error:
        raise click.BadParameter(str(error)) from None


def _parse_policy(_: click.Context, __: click.Parameter, text: str | None) -> Policy | None:
    from penstock.cli.sources import read_policy

    return None if text is None else read_policy(text)


def policy_option(verb: Verb) -> Verb:
    """``--versions`` of a plan."""
    return click.option(
        "--versions",
        type=PolicyName(),
        callback=_parse_policy,
        help="Train without a flush, with this weight-version policy: "
        f"{', '.join(POLICIES)}; fields follow the name, as in pipemare:t1=1000,t2=0.3.",
    )(verb)


def check_figure(path: str) -> None:
    """Raise ``InputError`` unless a file's name, or ``-``, is that of a figure, and what writes it
    is there."""
    if path == STANDARD_OUTPUT:
        return
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".pdf", ".png"):
        raise InputError(f"{path} must end in .svg, .pdf or .png, since a figure is drawn")
    if suffix != ".svg":
        from penstock.drawing.formats import check_installed

        check_installed(suffix)
