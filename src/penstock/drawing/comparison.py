"""Schedules beside each other: numbers in a table, timelines on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.foretold import Foretold, is_foretold
from penstock.core.timing.simulator import simulate
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import Titled, unit_for

COLUMNS = ("", "makespan", "bubble", "stage bubble", "peak activations")
"""What is said of each timeline."""


@dataclass(frozen=True)
class Comparison:
    """Timelines that are to be looked at together. As text a table; in a notebook also a picture of
    all of them on one time axis.

    Attributes:
        timelines: each with its title.
    """

    timelines: tuple[Titled, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Title, makespan, both bubbles and peak of activations (in microbatches of a rank's
        layers) of each timeline, as text."""
        unit = unit_for([timeline for _, timeline in self.timelines])
        return [
            (
                title,
                unit.show(timeline.makespan),
                f"{timeline.bubble:.1%}",
                f"{timeline.stage_bubble:.1%}",
                f"{max(timeline.peak_activations, default=0):.4g}",
            )
            for title, timeline in self.timelines
        ]

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        from penstock.drawing import cells

        table = cells.table(COLUMNS, self.rows())
        return cells.cell(table, cells.timelines_image(self.timelines))


Comparable = Schedule | Timeline | Foretold
"""What has a timeline, or can be simulated."""


def compare(
    *compared: Comparable | Mapping[str, Comparable], costs: Costs | None = None
) -> Comparison:
    """Put schedules, plans and timelines beside each other.

    Args:
        compared: schedules, which are simulated; plans, as they are predicted; timelines as they
            are, predicted or measured; or dicts of these, whose keys are their titles. By default a
            schedule is called by its name, all others by that and their source.
        costs: of a whole rank's layers, for the schedules; by default F = I = W = 1 and no hops.

    Raises:
        InputError: nothing to compare, something else than these, or two of the same title.
    """
    costs = Costs() if costs is None else costs
    expect(costs, Costs, "the costs", "make them with penstock.Costs")
    timelines = [(title, _timeline(thing, costs)) for title, thing in _titled(compared)]
    titles = [title for title, _ in timelines]
    if not titles:
        raise InputError("there is nothing to compare; give schedules, plans or timelines")
    if len(set(titles)) < len(titles):
        raise InputError(
            f"two of {', '.join(titles)} have the same title; give a dict with titles of your own"
        )
    return Comparison(tuple(timelines))


def _titled(
    compared: tuple[Comparable | Mapping[str, Comparable], ...],
) -> Iterator[tuple[str, Comparable]]:
    for thing in compared:
        if isinstance(thing, Mapping):
            yield from thing.items()
        elif isinstance(thing, Schedule):
            yield thing.name or "schedule", thing
        else:
            timeline = _timeline(thing, Costs())
            yield f"{timeline.name or 'schedule'}, {timeline.source}", timeline


def _timeline(thing: Comparable, costs: Costs) -> Timeline:
    if isinstance(thing, Timeline):
        return thing
    if is_foretold(thing):
        return thing.simulate()
    expect(thing, Schedule, "what is compared", "give schedules, plans or timelines")
    assert isinstance(thing, Schedule)  # nothing else is expected
    return simulate(thing, costs.spread(thing.num_stages / thing.num_ranks))
