"""Verbs about schedules: nothing here needs torch, so they start at once.

Sources beside each other: schedules by name take what is not given from the files among them, so
that all are on the same ranks, with the same microbatches and costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from penstock import drawing
from penstock.base.errors import InputError
from penstock.cli import options, show, sources
from penstock.cli.input import (
    check_source,
    check_sources,
    check_width,
    is_given,
    suffix_of,
    title_of,
)
from penstock.cli.options import ScheduleName, Source
from penstock.cli.output import STANDARD_OUTPUT, OutputFile, check_apart, write
from penstock.cli.sources import DrawableSource
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.check import check as check_schedule
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.op import Kind
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate as simulated
from penstock.core.versions import USUAL, Flush

if TYPE_CHECKING:
    from penstock.drawing.markup import Titled
    from penstock.planning.plans import Plan


class _FamilySetting(NamedTuple):
    """The shape and costs of schedules by name; ``costs`` are those of a whole rank's layers."""

    ranks: int
    microbatches: int
    costs: Costs


def _load_beside(
    names: Sequence[str], setting: _FamilySetting, given: Collection[str]
) -> list[DrawableSource]:
    """Load each of several names, in their order.

    Args:
        names: schedules and files, as ``sources.load`` reads them.
        setting: of schedules by name, as far as no file says it.
        given: fields of the setting that hold whatever files say.

    Raises:
        InputError: a plan's or a measured timeline's seconds cannot be those of a schedule by name.
    """
    ready = {name: sources.load(name, *setting) for name in names if _is_file(name)}
    pattern = _pattern(ready)
    if pattern is not None and len(ready) < len(names):
        ranks, microbatches = _shape(ready[pattern])
        setting = setting._replace(
            ranks=setting.ranks if "ranks" in given else ranks,
            microbatches=setting.microbatches if "microbatches" in given else microbatches,
        )
    loaded = [
        ready[name] if name in ready else _like(name, setting, pattern, ready, given)
        for name in names
    ]
    shapes = {name: _shape(source) for name, source in zip(names, loaded, strict=True)}
    if len(set(shapes.values())) > 1:
        named = (f"{name} {ranks} and {count}" for name, (ranks, count) in shapes.items())
        show.say(f"not alike, in ranks and microbatches: {', '.join(named)}")
    return _told_apart(names, loaded)


def _told_apart(names: Sequence[str], loaded: Sequence[DrawableSource]) -> list[DrawableSource]:
    """The sources; of those that would bear one name, and are both predicted or both measured,
    files have their own behind it."""
    counts = Counter((source.timeline.name, source.timeline.source) for source in loaded)
    return [
        source._replace(
            timeline=replace(source.timeline, name=f"{source.timeline.name} ({title_of(name)})")
        )
        if _is_file(name) and counts[source.timeline.name, source.timeline.source] > 1
        else source
        for name, source in zip(names, loaded, strict=True)
    ]


def _is_file(name: str) -> bool:
    return suffix_of(name, ".csv") in (".json", ".csv")


def _pattern(ready: dict[str, DrawableSource]) -> str | None:
    """The file that schedules by name are to be like: a plan rather than a timeline, a timeline
    rather than ops, which have no times."""
    return max(
        ready,
        key=lambda name: (ready[name].plan is not None, ready[name].schedule is None),
        default=None,
    )


def _shape(source: DrawableSource) -> tuple[int, int]:
    """Ranks and microbatches."""
    shown = source.shown
    microbatches = {op.microbatch for row in shown.rows for op in row.ops}
    return shown.num_ranks, source.num_ticks or len(microbatches)


def _like(
    name: str,
    setting: _FamilySetting,
    pattern: str | None,
    ready: dict[str, DrawableSource],
    given: Collection[str],
) -> DrawableSource:
    """A schedule by name, with the costs of the file that it stands beside."""
    source = None if pattern is None else ready[pattern]
    if source is None or "costs" in given:
        return sources.load_shown(name, *setting)
    if source.plan is None:
        if source.timeline.source == "measured":
            raise InputError(
                f"{pattern} was measured in seconds, which {name} has none of; name its plan's "
                "file, too, or give seconds with --costs"
            )
        return sources.load_shown(name, *setting)
    try:
        like = sources.load_shown(name, *setting._replace(costs=source.plan.costs))
    except InputError as error:
        raise InputError(
            f"{name} cannot have the costs of {pattern}: {error}; or give seconds with --costs"
        ) from None
    updates = Kind.UPDATE in {op.kind for row in source.timeline.rows for op in row.ops}
    flushes = not USUAL.get(name.partition(":")[0], Flush()).asynchronous
    if like.schedule is None or not (updates and flushes):
        return like
    updated = simulated(add_update(like.schedule), source.plan.costs)
    return like._replace(timeline=updated)


_SOURCE_HELP = (
    "SOURCE is a schedule's name, a .csv of ops, a .json schedule, plan, timeline or run, or -, "
    "standard input. "
    "Options of a schedule follow its name: interleaved-1f1b:stages_per_rank=4."
)


@click.command()
@click.argument("name", required=False, type=ScheduleName())
@options.json_option
def schedules(name: str | None, as_json: bool) -> None:
    """List the schedule families, or tell all about one (NAME)."""
    from penstock.core.schedule.about import about

    listed = [about(family) for family in (families.names() if name is None else [name])]
    if as_json:
        facts = [family.facts() for family in listed]
        show.print_json(facts if name is None else facts[0])
    elif name is None:
        show.print_table(("name", "law"), [(family.name, family.law) for family in listed], 2)
        show.prose(
            "\npenstock schedules NAME tells when a schedule wins, who published it, and more."
        )
    else:
        show.print_family(listed[0])


@click.command(epilog=_SOURCE_HELP)
@click.argument("source", type=Source())
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.arrivals_option
@options.json_option
def simulate(
    source: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    arrivals: float | None,
    as_json: bool,
) -> None:
    """Predict makespan, both bubbles and memory of a schedule; of a stream that a source feeds,
    rate and latency, too.

    Of partime, this is so many ticks of a stream that goes on.
    """
    # A source may give a plan more frames than it has microbatches.
    check_source(source, ("microbatches",) if arrivals is not None else ())
    loaded = sources.load_shown(source, ranks, microbatches, costs, arrivals)
    if as_json:
        show.print_json(show.metrics(loaded))
    else:
        show.print_metrics([loaded], costs)


@click.command(epilog=_SOURCE_HELP)
@click.argument("source", type=Source())
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.output_option("Picture to write: .svg, .pdf, .png, .html, .txt or .json (Chrome trace).")
@options.width_option
@options.versions_options
@options.json_option
def draw(
    source: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    output: str | None,
    width: float | None,
    versions: bool,
    policy: str | None,
    as_json: bool,
) -> None:
    """Draw a schedule, a plan or a timeline.

    A plan's picture shows its devices, stages, links and memory, and below them its predicted
    timeline. What never flushes is drawn in its steady state, with the versions of the weights that
    ops read; with --versions or --policy, from its beginning.
    """
    check_source(source)
    check_width(output)
    if versions or policy is not None:
        loaded = sources.load_with_versions(source, ranks, microbatches, costs, policy)
        versions = True
    else:
        from penstock.drawing.formats import is_trace  # no other verb here draws

        whole = is_trace(output)
        loaded, versions = sources.load_drawn(source, ranks, microbatches, costs, whole=whole)
    write(output, ".svg", lambda path: _write_picture(loaded, path, versions, width))
    if as_json:
        show.print_json({**show.metrics(loaded.with_schedule()), "output": output})
    elif output is None:
        show.echo(_in_terminal(loaded, versions))


def _write_picture(loaded: DrawableSource, path: str, versions: bool, width: float | None) -> None:
    if loaded.plan is None:
        drawing.draw(loaded.shown, path, versions=versions, width=width)
        return
    from penstock.planning.plans.picture import picture_of

    pictured = picture_of(loaded.plan)
    drawing.draw_plan(pictured, loaded.shown, path, versions=versions, width=width)


def _in_terminal(loaded: DrawableSource, versions: bool) -> str:
    if loaded.plan is None:
        return show.in_terminal(loaded.shown, versions)
    from penstock.drawing.plan_text import plan_with_timeline_text
    from penstock.planning.plans.picture import picture_of

    pictured = picture_of(loaded.plan)
    return plan_with_timeline_text(pictured, loaded.shown, versions, show.width())


@click.command(epilog=_SOURCE_HELP)
@click.argument("names", metavar="SOURCE...", nargs=-1, required=True, type=Source())
@options.ranks_option(4)
@options.microbatches_option(8)
@options.costs_option
@options.output_option("Also draw them stacked on one time axis: .svg, .pdf, .png, .html or .txt.")
@options.width_option
@click.option(
    "--scatter", type=OutputFile(), help="Also draw memory against both bubbles (.svg, .pdf, .png)."
)
@click.option(
    "--memory", type=OutputFile(),
    help="Also draw what ranks hold over time (.svg, .pdf, .png); the first source is a plan, the "
    "others are its timelines.",
)  # fmt: skip
@options.json_option
def compare(
    names: tuple[str, ...],
    ranks: int,
    microbatches: int,
    costs: Costs,
    output: str | None,
    width: float | None,
    scatter: str | None,
    memory: str | None,
    as_json: bool,
) -> None:
    """Compare schedules on the same ranks, microbatches and costs.

    Beside a file, schedules by name have its ranks and microbatches, and a plan's costs, as far as
    options do not say otherwise.
    """
    setting = _FamilySetting(ranks, microbatches, costs)
    check_sources(names)
    check_width(output)
    check_apart(output=output, scatter=scatter, memory=memory)
    for figure in filter(None, (scatter, memory)):
        options.check_figure(figure)
    if as_json and STANDARD_OUTPUT in (scatter, memory):
        raise click.UsageError("a picture on standard output and --json would mix; leave one out")
    given = {name for name in _FamilySetting._fields if is_given(name)}
    loaded = _load_beside(names, setting, given)
    plan = loaded[0].plan
    if memory is not None and plan is None:
        raise InputError(
            "only a plan knows bytes; give the plan's file first, then timelines that were "
            "measured with it"
        )
    titled = [
        (source.shown.name or name, source.shown)
        for name, source in zip(names, loaded, strict=True)
    ]
    write(output, ".svg", lambda path: drawing.draw_stacked(titled, path, width=width))
    write(scatter, ".svg", lambda path: drawing.draw_scatter(titled, path))
    if plan is not None:
        write(memory, ".svg", lambda path: _draw_memory(plan, titled, path))
    if as_json:
        show.print_json([show.metrics(source) for source in loaded])
        return
    if STANDARD_OUTPUT in (output, scatter, memory):
        return
    show.print_metrics(loaded, costs)
    if output is None and scatter is None and memory is None:
        show.echo(f"\n{show.stacked_in_terminal(titled)}")


def _draw_memory(plan: Plan, titled: Sequence[Titled], path: str) -> None:
    from penstock.planning.plans.picture import memory_limits, memory_over_time

    curves = {
        f"{title}, {timeline.source}": memory_over_time(plan, timeline)
        for title, timeline in titled
    }
    drawing.draw_memory(curves, memory_limits(plan), path)


@click.command(epilog=_SOURCE_HELP)
@click.argument("source", type=Source())
@options.ranks_option(4)
@options.microbatches_option(8)
@options.count_option(
    "--capacity",
    least=0,
    default=1,
    help="Messages a channel holds; 0: they pass in the order of their sends, one by one.",
)
@options.json_option
def check(source: str, ranks: int, microbatches: int, capacity: int, as_json: bool) -> None:
    """Prove that a schedule is complete and cannot deadlock."""
    check_source(source)
    content = sources.read(source)
    schedule: Schedule | None
    if isinstance(content, Schedule):
        schedule = content
    else:
        schedule = sources.loaded(content, source, ranks, microbatches, Costs()).schedule
    if schedule is None:
        raise InputError(f"{source} is a timeline; there is nothing left to check")
    check_schedule(schedule, capacity)
    counts = {
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "ops": schedule.num_ops,
        "capacity": capacity,
    }
    if as_json:
        show.print_json({"ok": True, **counts})
    else:
        holds = f"a channel holds {capacity} message(s)" if capacity else "a channel holds nothing"
        show.prose(
            f"ok: {schedule.num_ops} ops on {schedule.num_ranks} ranks, each once, in an order "
            f"that cannot deadlock even when {holds}"
        )
