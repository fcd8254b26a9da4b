"""A plan as values that are drawn: its picture with a timeline below (``drawn``), what a notebook
shows of it (``plan_cell``, ``what_if_cell``), and the memory of its ranks over time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from penstock.base.errors import InputError
from penstock.base.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_speed_up,
)
from penstock.base.values import expect
from penstock.core.schedule import Kind, Schedule
from penstock.core.schedule.memory import Curve
from penstock.core.timing.spans import Row
from penstock.core.timing.timeline import Timeline
from penstock.drawing import plan_picture as pictured
from penstock.drawing.plan_picture import PlanPicture
from penstock.drawing.timeline.excerpt import steady_part
from penstock.planning.plans.memory_parts import MemoryParts
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spilling import held_by_op, stage_bytes
from penstock.planning.plans.stage_plan import StagePlan
from penstock.planning.plans.table import Alternative, full_title

_COLUMNS = ("", "plan", "step", "bubble", "memory", "moved", "delay", "remark")
_PALEST = 3
_SPLITS = {
    "data": "by rows",
    "sequence": "by positions",
    "context": "by positions, keys and values in a ring",
    "column": "by outputs",
    "row": "by inputs",
    "any": "either way",
    "whole": "repeated",
    "features": "by features",
    "heads": "by heads",
    "vocabulary": "by classes, with the loss",
}


def picture_of(plan: Plan) -> pictured.PlanPicture:
    """The picture of a plan: its devices and what each of them does, what goes between
    them, and what else there was to choose."""
    groups = _groups(plan)
    return pictured.PlanPicture(
        title=full_title(plan),
        facts=tuple(_facts(plan)),
        reason=plan.reason,
        groups=tuple(_group(plan, ranks) for ranks in groups),
        flows=tuple(_flows(plan, groups)),
        choices=_choices(plan) if plan.alternatives else None,
    )


def _groups(plan: Plan) -> tuple[range, ...]:
    """Ranks that stand together: the replicas of a stage, or of all stages of a rank."""
    # Without replicas, a rank may have several stages, and a stage copies on several ranks.
    counts = plan.replicas
    if sum(counts) != plan.num_ranks:
        counts = (counts[0],) * (plan.num_ranks // counts[0])
    return tuple(
        range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)
    )


def _facts(plan: Plan) -> Iterator[str]:
    step, rank_bytes = plan.step_seconds, plan.rank_bytes
    if step and plan.prediction.is_live:
        light, saturated = map(format_seconds, plan.latency)
        yield f"up to {format_rate(plan.frames_per_second)}"
        yield f"an output {light} late at light load, {saturated} saturated"
    elif step and plan.versions.asynchronous:
        yield f"{format_seconds(step)} a minibatch in the steady state"
    elif step:
        yield f"{format_seconds(step)} a step"
        yield f"bubble {format_share(plan.prediction.bubble)}"
    if step:
        yield f"{format_speed_up(plan.one_device_seconds, step)} one device"
    if max(rank_bytes):
        yield f"{format_bytes(max(rank_bytes))} on the fullest device"
    rows = (row for rank in range(plan.num_ranks) for row in _devices(plan, rank))
    over = [f"{row.name} ({format_bytes(row.over_bytes)} over)" for row in rows if row.over_bytes]
    if over:
        more = f" and {len(over) - 1} more" if len(over) > 1 else ""
        yield f"does not fit: {over[0]}{more}"
    yield f"cost model {plan.cost_model}"


def _group(plan: Plan, ranks: Sequence[int]) -> pictured.RankGroup:
    stages = plan.placement.stages_of[ranks[0]]
    return pictured.RankGroup(
        tuple(_heading(plan, stage, ranks) for stage in stages),
        tuple(_rank(plan, rank) for rank in ranks),
    )


def _heading(plan: Plan, index: int, ranks: Sequence[int]) -> pictured.Heading:
    stage = plan.stages[index]
    times = _parts(stage, plan.placement.splits_backward)
    remarks = [f"{kind.value} {format_seconds(length)}" for kind, length in times if length]
    if len(ranks) > 1:
        remarks.append(f"{len(ranks)} replicas in turns")
    elsewhere = [rank for rank in plan.placement.ranks_of(index) if rank not in ranks]
    if elsewhere:
        remarks.append(f"also on rank {', '.join(map(str, elsewhere))}")
    return pictured.Heading(index, stage.layers, (*remarks, *_marks(plan, stage)))


def _marks(plan: Plan, stage: StagePlan) -> Iterator[str]:
    if stage.reduce_seconds:
        yield f"gradients summed in {format_seconds(stage.reduce_seconds)}"
    if stage.splits:
        counts = Counter(how.partition("/")[0] for how in stage.splits.values()).most_common()
        ways = ", ".join(f"{count} {_SPLITS[how]}" for how, count in counts)
        yield f"layers over {stage.tensor_ranks} devices: {ways}"
    if stage.weight_versions > 1:
        yield f"{stage.weight_versions} weight versions"
    if stage.recompute != "none":
        yield "runs forward twice" if stage.recompute == "stage" else "layers run forward twice"


def _parts(stage: StagePlan, splits: bool) -> list[tuple[Kind, float]]:
    """The parts of the time that a microbatch takes, in order."""
    parts = [(Kind.FORWARD, stage.forward_seconds)]
    if stage.recompute != "none":
        parts.append((Kind.RECOMPUTE, stage.again_seconds))
    first, second = stage.backward_input_seconds, stage.backward_weight_seconds
    if not splits:
        return [*parts, (Kind.BACKWARD, first + second)]
    parts.append((Kind.BACKWARD_INPUT, first))
    return [*parts, (Kind.BACKWARD_WEIGHT, second + stage.split_seconds)]


def _rank(plan: Plan, rank: int) -> pictured.RankRow:
    stages = plan.placement.stages_of[rank]
    last = max(len(stages) - 1, 1)
    shades = (round(place * _PALEST / last) for place in range(len(stages)))
    return pictured.RankRow(
        tuple(_block(plan, stage, shade) for stage, shade in zip(stages, shades, strict=True)),
        tuple(_devices(plan, rank)),
    )


def _block(plan: Plan, index: int, shade: int) -> pictured.StageBlock:
    stage, copies = plan.stages[index], plan.placement.copies[index]
    times = _parts(stage, plan.placement.splits_backward)
    parts = [(kind, length / copies) for kind, length in times]
    updates = plan.updates_per_minibatch[index] / plan.num_microbatches
    parts.append((Kind.UPDATE, stage.update_seconds * updates))
    return pictured.StageBlock(index, tuple(part for part in parts if part[1]), shade)


def _memory(parts: MemoryParts) -> tuple[int, ...]:
    """As ``MEMORY_PARTS`` has it."""
    return (
        parts.weights + parts.visiting,
        parts.gradients,
        parts.optimizer,
        parts.activations + parts.recomputed,
        parts.buffers + parts.communication + parts.workspace + parts.allocator,
    )


def _devices(plan: Plan, rank: int) -> Iterator[pictured.DeviceRow]:
    memory = _memory(plan.memory_parts[rank])
    sizes = plan.group_sizes
    count, first = sizes[rank], sum(sizes[:rank])
    if not plan.devices:
        for part in range(count):
            name = f"rank {rank}.{part}" if count > 1 else f"rank {rank}"
            yield pictured.DeviceRow(name, memory)
    for device in plan.devices[first : first + count]:
        speed = "" if device.speed == 1 else f" ({device.speed:g}×)"
        yield pictured.DeviceRow(f"{device.name}{speed}", memory, device.memory_bytes)


def _flows(plan: Plan, groups: Sequence[range]) -> Iterator[pictured.Flow]:
    """Values that stages hand to stages of other ranks; alike flows between two groups are one."""
    group_of = {rank: index for index, ranks in enumerate(groups) for rank in ranks}
    stages_of: dict[tuple[int, int, int, float], list[int]] = {}
    between = {
        (index, group_of[source], group_of[target])
        for index, source, target in _hand_overs(plan.placement)
        if group_of[source] != group_of[target]
    }
    for index, source, target in sorted(between):
        stage = plan.stages[index]
        alike = (source, target, stage.transfer_bytes, stage.hop_seconds)
        stages_of.setdefault(alike, []).append(index)
    for (source, target, num_bytes, length), stages in sorted(stages_of.items()):
        yield pictured.Flow(source, target, tuple(stages), num_bytes, length)


def _hand_overs(schedule: Schedule) -> set[tuple[int, int, int]]:
    """(stage, its rank, the next stage's rank) of every microbatch's forward."""
    forwards = (item for item in schedule.where.items() if item[0].kind is Kind.FORWARD)
    home = {(op.stage, op.microbatch): rank for op, rank in forwards}
    return {
        (stage, rank, home[stage + 1, microbatch])
        for (stage, microbatch), rank in home.items()
        if (stage + 1, microbatch) in home
    }


def _choices(plan: Plan) -> pictured.Choices:
    """The alternatives; this plan before them, unless it is one of them."""
    rows = [_choice(alternative) for alternative in plan.alternatives]
    chosen = [row for row, other in enumerate(plan.alternatives) if other.remark == "chosen"]
    if chosen:
        return pictured.Choices(_COLUMNS, tuple(rows), chosen[0])
    numbers = (
        format_seconds(plan.step_seconds),
        format_share(plan.prediction.bubble if plan.prediction.flushes else 0.0),
        format_bytes(max(plan.rank_bytes)),
    )
    this_plan = ("this plan", full_title(plan), *numbers, "", "", "")
    return pictured.Choices(_COLUMNS, (this_plan, *rows), 0)


def _choice(alternative: Alternative) -> tuple[str, ...]:
    return (
        alternative.label,
        alternative.description,
        format_seconds(alternative.step_seconds),
        format_share(alternative.bubble),
        format_bytes(alternative.memory_bytes),
        format_bytes(alternative.moved_bytes),
        f"{alternative.delay:g}",
        alternative.remark,
    )


def memory_of_stages(plan: Plan) -> Iterator[pictured.DeviceRow]:
    """The memory of the ranks, those that need as much for the same stages told once."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[int]] = {}
    rows = [next(_devices(plan, rank)) for rank in range(plan.num_ranks)]
    for rank, row in enumerate(rows):
        stages = tuple(plan.placement.stages_of[rank])
        alike.setdefault((stages, row.memory, row.limit_bytes), []).append(rank)
    for (stages, memory, limit), ranks in alike.items():
        numbers = ", ".join(map(str, stages))
        name = f"stage {numbers}" if len(stages) == 1 else f"stages {numbers}"
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        yield pictured.DeviceRow(f"{name}, {who}", memory, limit)


def fold_of(plan: Plan, timeline: Timeline) -> Timeline:
    """A timeline of a plan with one rank for each stage where all of its replicas do the same."""
    if len({*plan.replicas}) > 1 or plan.replicas[0] == 1:
        return timeline
    rows = timeline.rows[:: plan.replicas[0]]
    return replace(
        timeline, rows=rows, transfers=(), name=f"{timeline.name}, one of {plan.replicas[0]}"
    )


class _Changed(Protocol):
    """A plan before and after changes, as the planner gives them."""

    changes: str
    before: Plan
    after: Plan

    def rows(self) -> Sequence[tuple[str, str, str, str]]: ...


def plan_cell(plan: Plan) -> str:
    """A plan's devices and stages, and its predicted timeline."""
    from penstock.drawing import cells  # loads what draws; pictures of text need none of it

    return cells.plan_cell(picture_of(plan), plan.prediction.shown)


def what_if_cell(asked: _Changed) -> str:
    """The differences as a table, and both plans' timelines on one axis."""
    from penstock.drawing import cells

    names = ("now", f"with {asked.changes}")
    timelines = (plan.prediction.shown for plan in (asked.before, asked.after))
    pair = list(zip(names, timelines, strict=True))
    table = cells.table(("", *names, ""), asked.rows(), 4)
    return cells.cell(table, cells.timelines_image(pair))


class DrawnPlan(NamedTuple):
    """A plan's picture, the timeline below it, and whether that shows versions of weights."""

    picture: PlanPicture
    timeline: Timeline
    versions: bool


def drawn(plan: Plan, *, whole: bool = False) -> DrawnPlan:
    """The picture of a plan with its ``timeline_to_draw`` below."""
    return DrawnPlan(picture_of(plan), *timeline_to_draw(plan, whole=whole))


def timeline_to_draw(plan: Plan, *, whole: bool) -> tuple[Timeline, bool]:
    """What is drawn of a plan's steps, and whether with versions: of a schedule that flushes, one
    step; where it has very many microbatches, its beginning and its end, unless the ``whole`` is
    asked for. What never flushes is seen in its steady state, with the versions that its ops read,
    since its beginning looks like any other schedule's."""
    if plan.prediction.flushes:
        return plan.simulate() if whole else plan.marked(plan.prediction.ends), False
    return _steady(plan), True


def _steady(plan: Plan) -> Timeline:
    """The steady state of a plan that never flushes: as long as a minibatch, or as a few ticks."""
    prediction = plan.prediction
    shown = prediction.num_shown or prediction.shown_size
    return steady_part(plan.marked(prediction.stream_of(shown + 4 * plan.num_ranks)), shown)


def memory_over_time(plan: Plan, timeline: Timeline) -> tuple[Curve, ...]:
    """For each rank, (time, bytes held from then on): the weights, gradients and optimizer state of
    stages that are there, activations, and what always stays.

    The bytes are the plan's, the moments and the order those of the timeline. So the highest point
    of the plan's own prediction is ``plan.rank_bytes``, and a measured timeline differs from it
    where ops ran in another order or at another time.

    Args:
        timeline: of one step of this plan.

    Raises:
        InputError: the timeline has another number of ranks, or ops of stages that the plan lacks.
    """
    expect(timeline, Timeline, "the timeline", "take plan.simulate() or pipeline.timeline")
    if timeline.num_ranks != plan.num_ranks:
        raise InputError(
            f"the timeline has {timeline.num_ranks} ranks and the plan {plan.num_ranks}; take a "
            "timeline of this plan"
        )
    stages = {stage for row in timeline.rows for stage in {op.stage for op in row.ops}}
    if max(stages, default=0) >= len(plan.stages):
        raise InputError(
            f"the timeline has an op of stage {max(stages)} and the plan {len(plan.stages)} "
            "stages; take a timeline of this plan"
        )
    predicted = plan.simulate()
    return tuple(
        _curve(plan, timeline, row, most - _highest(plan, predicted, own))
        for row, own, most in zip(timeline.rows, predicted.rows, plan.rank_bytes, strict=True)
    )


def memory_limits(plan: Plan) -> tuple[float | None, ...]:
    """Bytes that each rank may hold, by the plan's budget or else by its devices; ``None`` where
    nobody says."""
    if plan.spill is not None and plan.spill.memory_bytes:
        return (plan.spill.memory_bytes,) * plan.num_ranks
    limits = (device.memory_bytes or None for device in plan.leaders)
    return tuple(limits) or (None,) * plan.num_ranks


def _curve(plan: Plan, timeline: Timeline, row: Row, always: float) -> Curve:
    points: list[tuple[float, float]] = []
    held = _held(plan, timeline, row)
    for begin, end, (during, behind) in zip(row.starts, row.ends, held, strict=True):
        points += [(begin, always + during), (end, always + behind)]
    return tuple(points)


def _highest(plan: Plan, timeline: Timeline, row: Row) -> float:
    return max((during for during, _ in _held(plan, timeline, row)), default=0.0)


def _held(plan: Plan, timeline: Timeline, row: Row) -> Iterator[tuple[float, float]]:
    own_bytes = stage_bytes(plan.stages) if plan.spill is not None else None
    return held_by_op(row.ops, plan.sizes, own_bytes, timeline.num_slices, timeline.activations)
