"""Verbs about schedules: nothing here needs torch, so they start at once."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from penstock.cli import options, show, sources
from penstock.cost import Costs
from penstock.drawing import draw as draw_timeline
from penstock.drawing import stacked
from penstock.errors import InputError
from penstock.schedule import Schedule, families
from penstock.schedule.check import check as check_schedule
from penstock.schedule.lower import add_communication
from penstock.values import read_text, write_atomically

_SOURCE_HELP = "SOURCE is a schedule's name, a .csv of ops, or a .json plan, timeline or run."


@click.command()
@options.json_option
def schedules(as_json: bool) -> None:
    """List the schedule families."""
    rows = []
    for name in families.names():
        family = families.family(name)
        law = " ".join((family.__doc__ or "").strip().split("\n\n", 1)[0].split())
        # The file of a family begins with its idea and names its paper.
        module = sys.modules[family.__module__]
        paper = " ".join((module.__doc__ or "").strip().split("\n\n", 1)[-1].split())
        rows.append({"name": name, "law": law, "paper": paper})
    if as_json:
        show.print_json(rows)
    else:
        columns = ("name", "law", "paper")
        show.print_table(columns, [[row[column] for column in columns] for row in rows], 3)


@click.command(epilog=_SOURCE_HELP)
@click.argument("source")
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.json_option
def simulate(source: str, ranks: int, microbatches: int, costs: Costs, as_json: bool) -> None:
    """Predict makespan, both bubbles and memory of a schedule."""
    timeline = sources.load(source, ranks, microbatches, costs).timeline
    if as_json:
        show.print_json(show.metrics(timeline))
    else:
        show.print_table(show.METRIC_COLUMNS, [show.metric_row(timeline)])


@click.command(epilog=_SOURCE_HELP)
@click.argument("source")
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.output_option("Picture to write: .svg, .html, .txt or .json (Chrome trace).")
@options.json_option
def draw(
    source: str, ranks: int, microbatches: int, costs: Costs, output: str | None, as_json: bool
) -> None:
    """Draw a schedule, a plan or a timeline."""
    timeline = sources.load(source, ranks, microbatches, costs).timeline
    picture = draw_timeline(timeline, output)
    if as_json:
        show.print_json({**show.metrics(timeline), "output": output})
    elif output is None:
        click.echo(picture)
    else:
        show.say(f"wrote {output}")


@click.command(epilog=_SOURCE_HELP)
@click.argument("names", metavar="SOURCE...", nargs=-1, required=True)
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.output_option("Also draw them stacked on one time axis: .svg or .txt.")
@options.json_option
def compare(
    names: tuple[str, ...],
    ranks: int,
    microbatches: int,
    costs: Costs,
    output: str | None,
    as_json: bool,
) -> None:
    """Compare schedules on the same ranks, microbatches and costs."""
    timelines = [sources.load(name, ranks, microbatches, costs).timeline for name in names]
    pictures = "\n\n".join(draw_timeline(timeline) for timeline in timelines)
    if output is not None:
        suffix = Path(output).suffix
        if suffix not in (".svg", ".txt"):
            raise InputError(f"cannot draw {output!r}: end the name in .svg or .txt")
        titled = [(timeline.name, timeline) for timeline in timelines]
        write_atomically(output, stacked(titled) if suffix == ".svg" else pictures + "\n")
        show.say(f"wrote {output}")
    if as_json:
        show.print_json([show.metrics(timeline) for timeline in timelines])
        return
    show.print_table(show.METRIC_COLUMNS, [show.metric_row(timeline) for timeline in timelines])
    if output is None:
        click.echo(f"\n{pictures}")


@click.command(epilog=_SOURCE_HELP)
@click.argument("source")
@options.ranks_option(4)
@options.microbatches_option(8)
@click.option("--capacity", default=1, show_default=True, help="Messages a channel holds.")
@options.json_option
def check(source: str, ranks: int, microbatches: int, capacity: int, as_json: bool) -> None:
    """Prove that a schedule is complete and cannot deadlock."""
    if Path(source).suffix == ".csv":
        schedule: Schedule | None = Schedule.parse(read_text(source), Path(source).stem)
    else:
        schedule = sources.load(source, ranks, microbatches, Costs()).schedule
    if schedule is None:
        raise InputError(f"{source} is a timeline; there is nothing left to check")
    check_schedule(schedule)
    if not any(op.kind.value.startswith(("SEND", "RECV")) for op in schedule.where):
        check_schedule(add_communication(schedule), capacity)
    counts = {
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "ops": len(schedule.where),
        "capacity": capacity,
    }
    if as_json:
        show.print_json({"ok": True, **counts})
    else:
        click.echo(
            f"ok: {len(schedule.where)} ops on {schedule.num_ranks} ranks, each once, in an order "
            f"that cannot deadlock even when a channel holds {capacity} message(s)"
        )


SCHEDULE_VERBS = (schedules, simulate, draw, compare, check)
