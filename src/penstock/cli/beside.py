"""Sources beside each other: schedules by name take what is not given from the files among them, so
that all are on the same ranks, with the same microbatches and costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.cli import sources
from penstock.cli.input import suffix_of
from penstock.cli.show import say
from penstock.cli.sources import Drawable
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.op import Kind
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.versions import USUAL, Flush


class Setting(NamedTuple):
    """What schedules by name are built for; ``costs`` are those of a whole rank's layers."""

    ranks: int
    microbatches: int
    costs: Costs


def load_beside(names: Sequence[str], setting: Setting, given: Collection[str]) -> list[Drawable]:
    """What each name means, in their order.

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
        told = (f"{name} {ranks} and {count}" for name, (ranks, count) in shapes.items())
        say(f"not alike, in ranks and microbatches: {', '.join(told)}")
    return loaded


def _is_file(name: str) -> bool:
    return suffix_of(name, ".csv") in (".json", ".csv")


def _pattern(ready: dict[str, Drawable]) -> str | None:
    """The file that schedules by name are to be like: a plan rather than a timeline, a timeline
    rather than ops, which have no times."""
    return max(
        ready,
        key=lambda name: (ready[name].plan is not None, ready[name].schedule is None),
        default=None,
    )


def _shape(source: Drawable) -> tuple[int, int]:
    """Ranks and microbatches."""
    shown = source.shown
    microbatches = {op.microbatch for row in shown.rows for op in row.ops}
    return shown.num_ranks, source.num_ticks or len(microbatches)


def _like(
    name: str,
    setting: Setting,
    pattern: str | None,
    ready: dict[str, Drawable],
    given: Collection[str],
) -> Drawable:
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
    updated = simulate(add_update(like.schedule), source.plan.costs)
    return like._replace(timeline=updated)
