"""How results look in a terminal: tables, and bars (lines without a terminal) for whatever takes
longer than two seconds.

rich takes as long to load as all of ours; it is loaded where something is shown that needs it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import click

from penstock.base.errors import printable
from penstock.base.telling import WARNING, Telling, is_quiet, wrap_to
from penstock.base.units import format_bytes, format_share
from penstock.base.values import encode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from penstock.cli.sources import DrawableSource
    from penstock.core.schedule.about import About
    from penstock.core.timing.costs import Costs
    from penstock.core.timing.timeline import Timeline
    from penstock.drawing import Fact
    from penstock.drawing.markup import Titled
    from penstock.trial import Contestant


NARROWEST = 80
"""Columns that a window is taken to have at least, and where nobody says how many it has."""

_FOLDS_TO = 24
"""Columns that a text in a table keeps where it must give way to numbers."""

_NAMED = "{task.description:<40}"
"""The label of a bar: the name of its task."""

_GAP = 2
"""Columns between two of a table."""


def width() -> int:
    """How many columns what is shown may have: as many as the window, of which ``COLUMNS`` in the
    environment or else the terminal knows, and 80 where there is none."""
    return max(NARROWEST, shutil.get_terminal_size((NARROWEST, 24)).columns)


def echo(text: str = "", *, err: bool = False) -> None:
    """Print text of which parts may come from files, so that a terminal takes nothing in it for a
    command. All verbs print through here, or as a table."""
    click.echo(printable(text), err=err)


def prose(text: str, *, err: bool = False) -> None:
    """Print sentences, wrapped; what stands on lines of its own stays so."""
    echo("\n".join(map(wrapped, text.split("\n"))), err=err)


def wrapped(line: str, beside: str = "") -> str:
    """A line of prose as several.

    Args:
        beside: what stands before it, under which the other lines are indented.
    """
    return wrap_to(line, width(), beside)


def warn(text: str, *, err: bool = False) -> None:
    """Print what is doubtful, behind a mark."""
    echo(wrapped(text, WARNING), err=err)


def say(text: str) -> None:
    """A line of progress, on standard error, so that standard output holds only results."""
    echo(text, err=True)


def print_json(value: object) -> None:
    """A result for programs."""
    echo(encode(value))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_texts: int = 1,
    *,
    beside: bool = False,
) -> None:
    """A table; the first ``num_texts`` columns are text, to the left, the others numbers. Columns
    that the window has no room for stand in a second one below, behind the first column again. One
    that stands ``beside`` the results goes to standard error."""
    from rich.console import Console

    shown = [tuple(map(printable, row)) for row in rows]
    # Nobody's window is too narrow for a long name, and programs look for it in one piece.
    whole_names = not Console(stderr=beside).is_terminal
    widths = _widths(columns, shown, num_texts, whole_names)
    # Numbers stand beside a name that takes up the line, rather than each below it again.
    for number, part in enumerate(_parts(widths, max(width(), 2 * widths[0]))):
        if number:
            echo(err=beside)
        room = max(width(), sum(widths[at] + _GAP for at in part) - _GAP)
        # rich makes columns narrower than a number where it has to break several names itself.
        whole = sum(max(widths[at], len(columns[at])) + _GAP for at in part) - _GAP
        names = columns if whole <= room else [name.replace(" ", "\n") for name in columns]
        table = _table(names, shown, part, widths, num_texts, whole_names)
        _print_trimmed(Console(width=room, stderr=beside, markup=False, emoji=False), table)


def _print_trimmed(console: Console, table: Table) -> None:
    """Print without the blanks with which rich fills lines up: they are in the way of whoever
    copies lines or compares files."""
    with console.capture() as capture:
        console.print(table)
    lines = (line.rstrip() for line in capture.get().split("\n"))
    click.echo("\n".join(lines), err=console.stderr, nl=False)


def _widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int, whole_names: bool
) -> list[int]:
    """How many columns each column of a table needs: numbers all of theirs, since one that takes
    two lines would read as two; texts may fold, but between words."""
    widths = []
    for index, name in enumerate(names):
        longest = max([len(row[index]) for row in rows], default=0)
        words = list(name.split())
        if 0 < index < num_texts:
            longest = min(longest, _FOLDS_TO)
            words += [word for row in rows for word in row[index].split()]
        elif index < num_texts and not whole_names:
            longest = min(longest, _FOLDS_TO)
        widths.append(max([longest, *map(len, words)]))
    return widths


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand beside each other; all parts begin with the first.

    >>> _parts([10, 20, 30, 20], 60)
    [[0, 1], [0, 2], [0, 3]]
    >>> _parts([10, 20, 30, 20], 90), _parts([100, 20], 80)
    ([[0, 1, 2, 3]], [[0, 1]])
    """
    parts: list[list[int]] = [[0]]
    for index in range(1, len(widths)):
        taken = sum(widths[at] + _GAP for at in parts[-1])
        if len(parts[-1]) > 1 and taken + widths[index] > room:
            parts.append([0])
        parts[-1].append(index)
    return parts


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    part: Sequence[int],
    widths: Sequence[int],
    num_texts: int,
    whole_names: bool,
) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index in part:
        is_text = index < num_texts
        least = max(map(len, names[index].split()), default=0)
        if index or not is_text:
            least = widths[index]
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(
            names[index],
            justify=justify,
            overflow="fold",
            min_width=least,
            no_wrap=whole_names and not index,
        )
    for row in rows:
        table.add_row(*(row[index] for index in part))
    return table


def print_facts(facts: Sequence[Fact]) -> None:
    """The headline numbers of a run, a line each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for fact in facts:
        value = Text(printable(fact.value), style="dim" if fact.doubtful else "bold")
        table.add_row(printable(fact.label), value, printable(fact.note))
    _print_trimmed(Console(width=width(), markup=False, emoji=False), table)


def print_family(family: About) -> None:
    """Everything that a family says about itself."""
    named = [("law", family.law), *(("", more) for more in family.details)]
    named += [("wins", family.wins), ("loses", family.loses)]
    for option in family.options:
        default = f" (default {option.default})" if option.default else ""
        named.append(("option", f"{option.name}{default}: {option.meaning}".rstrip(": ")))
    named.append(("paper", family.citation))
    click.secho(f"{family.title} ({family.name})", bold=True)
    prose(family.summary)
    for name, words in named:
        if words:
            echo(f"\n{wrapped(words, f'{name:<8}')}")
    for paper in family.papers:
        echo(f"\n{paper.bibtex()}")
    if family.drawing:
        echo(f"\n{_drawing_of(family)}")


def _drawing_of(family: About) -> str:
    if max(map(len, family.drawing.splitlines())) <= width():
        return family.drawing
    return f"`penstock draw {family.name}` draws it."


def in_terminal(timeline: Timeline, versions: bool = False) -> str:
    """A timeline as text that fits the window."""
    from penstock.drawing.timeline.text import text

    return text(timeline, versions=versions, window=width())


def stacked_in_terminal(timelines: Sequence[Titled]) -> str:
    """Text drawings on one time axis, if they can be read at this width."""
    from penstock.drawing.timeline.text import columns_beside, columns_of_shortest, stacked_text

    drawn = [timeline for _, timeline in timelines]
    wide = width() - max(map(columns_beside, drawn))
    if columns_of_shortest(drawn, wide) < 1:
        return "Too long to draw here; write a picture with -o, for example -o compare.svg."
    return stacked_text(timelines, wide, wide, window=width())


def metrics(source: DrawableSource) -> dict[str, object]:
    """A timeline's numbers, for ``--json``; what only a schedule or a plan knows is null without
    one."""
    timeline, schedule, sizes = source.shown, source.schedule, source.sizes
    whole = source.timeline
    return {
        "name": timeline.name,
        "source": timeline.source,
        "num_ranks": timeline.num_ranks,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "stage_bubble": timeline.stage_bubble,
        "peak_activations": timeline.peak_activations,
        "peak_activation_bytes": timeline.peak_bytes(sizes) if sizes else None,
        "num_hops": source.num_hops,
        "weight_copies": schedule.weight_copies if schedule else None,
        "rate": whole.rate if source.is_fed else None,
        "transit": whole.transits[-1] if source.is_fed else None,
        "latency": whole.latencies[-1] if source.is_fed else None,
    }


def print_metrics(sources: Sequence[DrawableSource], costs: Costs) -> None:
    """Numbers of timelines as a table, with a column for bytes where a plan knows them.

    Args:
        costs: of schedules that have no times of their own.
    """
    columns = ["schedule", "makespan", "bubble", "stage bubble", "peak activations"]
    with_bytes = any(source.sizes for source in sources)
    columns += ["in bytes"] if with_bytes else []
    rows = [_metric_row(source, with_bytes) for source in sources]
    fed = any(source.is_fed for source in sources)
    if fed:
        rows = [row + _flow_of(source) for row, source in zip(rows, sources, strict=True)]
    flow = ["rate", "transit", "latency"] if fed else []
    print_table([*columns, "hops", "weight copies", *flow], rows)
    if fed:
        prose(
            "\ntransit: from a frame's entry to its output, the last frame's; latency: from its "
            "arrival, so with its wait"
        )
    if all(source.plan is None and source.schedule is not None for source in sources):
        _print_costs(costs)


def _print_costs(costs: Costs) -> None:
    """Under which costs the numbers of schedules hold: others may rank them otherwise."""
    parts = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    named = ", ".join(
        f"{name} {_cost(value)}" for name, value in {**parts, "hop": costs.hop}.items()
    )
    prose(f"\ncosts (--costs): {named}")


def _cost(value: float | Sequence[float]) -> str:
    """One number, or one per stage."""
    values = [value] if isinstance(value, int | float) else value
    return "/".join(f"{cost:g}" for cost in values)


def _flow_of(source: DrawableSource) -> list[str]:
    if not source.is_fed:
        return ["–", "–", "–"]
    timeline = source.timeline
    numbers = timeline.rate, timeline.transits[-1], timeline.latencies[-1]
    return [f"{number:.4g}" for number in numbers]


def _metric_row(source: DrawableSource, with_bytes: bool) -> list[str]:
    timeline, schedule, sizes = source.shown, source.schedule, source.sizes
    row = [
        timeline.name or "schedule",
        f"{timeline.makespan:.4g}",
        format_share(timeline.bubble, 2),
        format_share(timeline.stage_bubble, 2),
        f"{max(timeline.peak_activations, default=0):.4g}",
    ]
    if with_bytes:
        row.append(format_bytes(max(timeline.peak_bytes(sizes))) if sizes else "–")
    row.append("–" if source.num_hops is None else str(source.num_hops))
    row.append(str(schedule.weight_copies) if schedule else "–")
    return row


@contextmanager
def counting(doing: str, *, quietly: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts to a total and goes when it is there, or without a terminal a line every
    few seconds; yields what takes (done, total).

    Args:
        doing: what is being done, for people.
        quietly: show nothing.
    """
    if quietly or not _has_terminal():
        with Telling(doing, quiet=bool(quietly)) as telling:
            yield telling.count
        return
    with _bars(doing, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def profiling() -> Iterator[Callable[[int, int], None]]:
    """A bar for the passes of a profile; lines without a terminal."""
    if not _has_terminal():
        with Telling("profiling") as telling:
            yield telling.count
        return
    with _bars(_NAMED) as bars:
        task = bars.add_task("profile", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def training(num_steps: int, unit: str, num_units: int) -> Iterator[Callable[[Contestant], None]]:
    """A bar per contestant, with loss, held-out loss and throughput. Without a terminal a line
    every few seconds, and one per contestant at the end."""

    def facts(contestant: Contestant) -> str:
        held_out = f"  held-out {contestant.held_out[-1][1]:.3f}" if contestant.held_out else ""
        recent = contestant.seconds[-5:]
        rate = num_units * len(recent) / sum(recent)
        return f"loss {contestant.losses[-1]:.3f}{held_out}  {rate:,.0f} {unit}s/s"

    if not _has_terminal():
        last: dict[str, str] = {}
        with Telling("training") as telling:

            def tell(contestant: Contestant) -> None:
                done = f"{len(contestant.losses)} of {num_steps} steps"
                last[contestant.name] = f"{contestant.name}: {done}, {facts(contestant)}"
                telling.update(last[contestant.name])

            yield tell
        if not is_quiet():
            for line in last.values():
                say(line)
        return

    with _bars(_NAMED, "{task.fields[facts]}") as bars:
        tasks: dict[str, TaskID] = {}

        def advance(contestant: Contestant) -> None:
            if contestant.name not in tasks:
                tasks[contestant.name] = bars.add_task(contestant.name, total=num_steps, facts="")
            bars.update(
                tasks[contestant.name],
                completed=len(contestant.losses),
                facts=facts(contestant),
            )

        yield advance


def _has_terminal() -> bool:
    """Whether bars can be drawn; otherwise how far something is takes lines."""
    return bool(getattr(sys.stderr, "isatty", bool)()) and not is_quiet()


def _bars(label: str, facts: str = "", *, transient: bool = False) -> Progress:
    """Bars behind a label, which may name fields of their tasks, and facts behind them."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn(label),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        *([TextColumn(facts)] if facts else []),
        console=Console(stderr=True),
        transient=transient,
    )
