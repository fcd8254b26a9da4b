"""Plans for a live source: the fewest devices that keep its rate, or what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

from penstock.base.errors import PlanError
from penstock.base.units import count_of, format_rate, format_seconds
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.offers import offers
from penstock.planning.planner.race import fastest
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.shortfall import with_more_devices
from penstock.planning.planner.task import Task

_ROUNDING = 1e-9
_TIMES_AS_MANY = (2, 4, 8)


@dataclass(frozen=True)
class Kept:
    """A plan that keeps a rate, and what fewer devices would give.

    Attributes:
        chosen: the plan.
        fewer: the fastest plan for each smaller number of devices that was worth a look.
    """

    chosen: Candidate
    fewer: tuple[Candidate, ...]

    def reason(self, rate: float) -> str:
        """One sentence on why it is this plan."""
        count = self.chosen.setting.num_ranks
        kept = f"{self.chosen} keeps {format_rate(rate)}: it gives {_rate_of(self.chosen)}"
        if count == 1:
            return f"{kept}; one device is enough"
        if not self.fewer:
            return f"{kept}; fewer devices are too slow, or too small"
        last = self.fewer[-1]
        return f"{kept}; {count_of(last.setting.num_ranks, 'device')} would give {_rate_of(last)}"


def keeping(tasks: Sequence[Task], constraints: Constraints, rate: float) -> Kept | None:
    """The plan on the fewest devices that takes so many frames per second, the fastest of those;
    ``None`` if none does.

    Args:
        tasks: one per microbatch size.
        constraints: with a schedule that never flushes.
        rate: in frames per second; every microbatch is a frame.
    """
    fewer: list[Candidate] = []
    for _, candidate in _by_devices(tasks, constraints, rate):
        if candidate.frames_per_second >= rate * (1 - _ROUNDING):
            return Kept(candidate, tuple(fewer))
        fewer.append(candidate)
    return None


def _by_devices(
    tasks: Sequence[Task], constraints: Constraints, rate: float
) -> Iterator[tuple[int, Candidate]]:
    """(devices, the fastest plan for as many stages), where devices could be fast enough."""
    most = min(max(len(task.cluster.devices) for task in tasks), tasks[0].num_layers)
    for count in range(1, most + 1) if constraints.stages is None else (constraints.stages,):
        there = replaced(constraints, stages=count)
        able = [task for task in tasks if _could(task, there, rate)]
        candidate = fastest(able, there) if able else None
        if candidate is not None:
            yield count, candidate


def _could(task: Task, constraints: Constraints, rate: float) -> bool:
    """Whether as many devices as stages would keep a rate if nothing were lost on the way."""
    seconds = task.num_microbatches / rate
    most = (offer for offer in offers(task, constraints) if offer.num_ranks == constraints.stages)
    return any(offer.least_seconds(task) <= seconds * (1 + _ROUNDING) for offer in most)


def missing(
    tasks: Sequence[Task], constraints: Constraints, rate: float, best: Candidate
) -> PlanError:
    """Why no plan keeps a rate: what is too slow, what can be reached, and what would help.

    Args:
        tasks, constraints, rate: as for ``keeping``.
        best: the fastest plan that there is.
    """
    devices = count_of(best.setting.num_ranks, "device")
    return PlanError(
        f"no plan keeps {format_rate(rate)}: the fastest, {best}, gives {_rate_of(best)} on "
        f"{devices}; {_what_is_slow(best, rate)}; {_what_helps(tasks, constraints, rate)}"
    )


def _what_is_slow(best: Candidate, rate: float) -> str:
    period = 1 / rate
    ticks = [stage.busy_seconds + stage.update_seconds for stage in best.stages]
    slowest = max(range(len(ticks)), key=ticks.__getitem__)
    layers = best.stages[slowest].layers
    named = layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
    if ticks[slowest] > period * (1 + _ROUNDING):
        return (
            f"its stage {slowest} ({named}) takes {format_seconds(ticks[slowest])} for a frame, "
            f"and frames come every {format_seconds(period)}"
        )
    hop = max(stage.hop_seconds for stage in best.stages)
    return (
        f"no stage takes longer than the {format_seconds(period)} between frames, but hops of up "
        f"to {format_seconds(hop)} hold them up, of which {format_seconds(period / 2)} are free"
    )


def _what_helps(tasks: Sequence[Task], constraints: Constraints, rate: float) -> str:
    free = replaced(constraints, stages=None, cuts=())
    if constraints.stages is not None and keeping(tasks, free, rate) is not None:
        return "leave stages to the planner, which finds a plan that does"
    for times in _TIMES_AS_MANY:
        if times * len(tasks[0].cluster.devices) > 2 * tasks[0].num_layers:
            break
        more = [with_more_devices(task, times) for task in tasks]
        kept = keeping(more, free, rate)
        if kept is not None:
            return f"{count_of(kept.chosen.setting.num_ranks, 'device')} like these would do"
    layers = [
        (layer.compute_seconds + layer.update_seconds, layer.name)
        for layer in tasks[0].graph.layers
    ]
    seconds, name = max(layers)
    fastest_device = max(device.speed for device in tasks[0].cluster.devices)
    if seconds / fastest_device > 1 / rate:
        return (
            f"more devices like these do not help, since layer {name} alone takes "
            f"{format_seconds(seconds / fastest_device)}: make it smaller, split it in two, or "
            "show it fewer pixels"
        )
    return "take smaller frames, or faster devices or links"


def _rate_of(candidate: Candidate) -> str:
    return format_rate(candidate.frames_per_second)
