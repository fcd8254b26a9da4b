"""From a plan to the values that its picture is drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.drawing.plan import picture as pictured
from penstock.plans.plan import Plan
from penstock.plans.stage_plan import StagePlan, bytes_of_ranks
from penstock.plans.table import count_of, format_bytes, format_seconds, format_speed_up
from penstock.schedule import Kind, Schedule
from penstock.schedule.families.replicated import read_replicas
from penstock.timing.timeline import Timeline

_COLUMNS = ("", "plan", "step", "bubble", "memory", "moved", "delay", "remark")
_PALEST = 3
_SPLITS = {"data": "by rows", "column": "by outputs", "row": "by inputs", "any": "either way"}


def picture_of(plan: Plan, timeline: Timeline | None = None) -> pictured.PlanPicture:
    """What the picture of a plan shows: its devices and what each of them does, what goes between
    them, and what else there was to choose.

    Args:
        plan: which.
        timeline: its prediction, if it has been made already.
    """
    sheet = _Sheet(plan, timeline)
    return pictured.PlanPicture(
        title=_title(plan),
        facts=tuple(_facts(sheet)),
        reason=plan.reason,
        groups=tuple(_group(sheet, ranks) for ranks in sheet.groups),
        flows=tuple(_flows(sheet)),
        choices=_choices(sheet) if plan.alternatives else None,
    )


@dataclass(frozen=True)
class _Sheet:
    """A plan and what follows from it, worked out once."""

    plan: Plan
    given_timeline: Timeline | None

    @cached_property
    def timeline(self) -> Timeline:
        return self.given_timeline or self.plan.simulate()

    @cached_property
    def schedule(self) -> Schedule:
        return self.plan.placement

    @cached_property
    def splits(self) -> bool:
        """Whether backwards come in two halves."""
        return any(op.kind is Kind.BACKWARD_INPUT for op in self.schedule.where)

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        return bytes_of_ranks(self.plan.stages, self.schedule)

    @cached_property
    def step_seconds(self) -> float:
        # A stream's pace is not in its timeline, a step's length is.
        asynchronous = self.plan.versions.asynchronous
        return self.plan.step_seconds if asynchronous else self.timeline.makespan

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """Ranks that stand together: the replicas of a stage."""
        given = read_replicas(self.plan.options.get("replicas", ()))
        groups, first = [], 0
        for count in given or (1,) * self.schedule.num_ranks:
            groups.append(range(first, first + count))
            first += count
        return tuple(groups)


def _title(plan: Plan) -> str:
    words = [
        f"{plan.schedule}: {count_of(len(plan.stages), 'stage')} on "
        f"{count_of(plan.num_ranks, 'rank')}"
    ]
    if plan.num_tensor_ranks > 1:
        words.append(f"{plan.num_tensor_ranks} devices each")
    count = count_of(plan.num_microbatches, "microbatch", "es")
    words.append(f"{count} of {plan.microbatch_size}" if plan.microbatch_size else count)
    if plan.versions.asynchronous:
        words.append(f"versions: {plan.versions.name}")
    return ", ".join(words)


def _facts(sheet: _Sheet) -> Iterator[str]:
    plan, step = sheet.plan, sheet.step_seconds
    if step and plan.versions.asynchronous:
        yield f"{format_seconds(step)} a minibatch in the steady state"
    elif step:
        yield f"{format_seconds(step)} a step"
        yield f"bubble {sheet.timeline.bubble:.1%}"
    if step:
        yield f"{format_speed_up(plan.one_device_seconds, step)} one device"
    if max(sheet.rank_bytes):
        yield f"{format_bytes(max(sheet.rank_bytes))} on the fullest device"
    rows = (row for rank in range(plan.num_ranks) for row in _devices(sheet, rank))
    over = [f"{row.name} ({format_bytes(row.over_bytes)} over)" for row in rows if row.over_bytes]
    if over:
        more = f" and {len(over) - 1} more" if len(over) > 1 else ""
        yield f"does not fit: {over[0]}{more}"
    yield f"cost model {plan.cost_model}"


def _group(sheet: _Sheet, ranks: Sequence[int]) -> pictured.RankGroup:
    own = sheet.schedule.stages_of[ranks[0]]
    return pictured.RankGroup(
        tuple(_heading(sheet, stage, ranks) for stage in own),
        tuple(_rank(sheet, rank) for rank in ranks),
    )


def _heading(sheet: _Sheet, index: int, ranks: Sequence[int]) -> pictured.Heading:
    stage = sheet.plan.stages[index]
    times = _parts(stage, sheet.splits)
    remarks = [f"{kind.value} {format_seconds(length)}" for kind, length in times if length]
    if len(ranks) > 1:
        remarks.append(f"{len(ranks)} replicas in turns")
    elsewhere = [rank for rank in sheet.schedule.ranks_of(index) if rank not in ranks]
    if elsewhere:
        remarks.append(f"also on rank {', '.join(map(str, elsewhere))}")
    return pictured.Heading(index, stage.layers, (*remarks, *_marks(sheet.plan, stage)))


def _marks(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """What is special about a stage."""
    if stage.reduce_seconds:
        yield f"gradients summed in {format_seconds(stage.reduce_seconds)}"
    if stage.splits:
        counts = Counter(stage.splits.values()).most_common()
        ways = ", ".join(f"{count} {_SPLITS[how]}" for how, count in counts)
        yield f"layers over {plan.num_tensor_ranks} devices: {ways}"
    if stage.weight_versions > 1:
        yield f"{stage.weight_versions} weight versions"
    if stage.recompute != "none":
        yield "runs forward twice" if stage.recompute == "stage" else "layers run forward twice"


def _parts(stage: StagePlan, splits: bool) -> list[tuple[Kind, float]]:
    """What a microbatch takes, in order."""
    parts = [(Kind.FORWARD, stage.forward_seconds)]
    if stage.recompute != "none":
        parts.append((Kind.RECOMPUTE, stage.again_seconds))
    first, second = stage.backward_input_seconds, stage.backward_weight_seconds
    if not splits:
        return [*parts, (Kind.BACKWARD, first + second)]
    parts.append((Kind.BACKWARD_INPUT, first))
    return [*parts, (Kind.BACKWARD_WEIGHT, second + stage.split_seconds)]


def _rank(sheet: _Sheet, rank: int) -> pictured.RankRow:
    own = sheet.schedule.stages_of[rank]
    last = max(len(own) - 1, 1)
    shades = (round(at * _PALEST / last) for at in range(len(own)))
    return pictured.RankRow(
        tuple(_block(sheet, stage, shade) for stage, shade in zip(own, shades, strict=True)),
        tuple(_devices(sheet, rank)),
    )


def _block(sheet: _Sheet, index: int, shade: int) -> pictured.Block:
    plan, copies = sheet.plan, sheet.schedule.copies[index]
    stage = plan.stages[index]
    parts = [(kind, length / copies) for kind, length in _parts(stage, sheet.splits)]
    updates = plan.updates_per_minibatch[index] / plan.num_microbatches
    parts.append((Kind.UPDATE, stage.update_seconds * updates))
    return pictured.Block(index, tuple(part for part in parts if part[1]), shade)


def _memory(stages: Sequence[StagePlan], num_bytes: int) -> tuple[int, ...]:
    """As ``MEMORY_PARTS`` has it."""
    state = sum(stage.state_bytes for stage in stages)
    return (
        sum(stage.weight_versions * stage.parameter_bytes for stage in stages),
        sum(stage.parameter_bytes for stage in stages),
        sum(stage.optimizer_bytes for stage in stages),
        max(num_bytes - state, 0),
        sum(stage.buffer_bytes + stage.workspace_bytes + stage.sum_bytes for stage in stages),
    )


def _devices(sheet: _Sheet, rank: int) -> Iterator[pictured.DeviceRow]:
    plan, own = sheet.plan, sheet.schedule.stages_of[rank]
    memory = _memory([plan.stages[stage] for stage in own], sheet.rank_bytes[rank])
    count = plan.num_tensor_ranks
    if not plan.devices:
        for part in range(count):
            name = f"rank {rank}.{part}" if count > 1 else f"rank {rank}"
            yield pictured.DeviceRow(name, memory)
    for device in plan.devices[rank * count : (rank + 1) * count]:
        speed = "" if device.speed == 1 else f" ({device.speed:g}×)"
        yield pictured.DeviceRow(f"{device.name}{speed}", memory, device.memory_bytes)


def _flows(sheet: _Sheet) -> Iterator[pictured.Flow]:
    """What stages hand on to stages of other ranks; alike flows between two groups are one."""
    group_of = {rank: index for index, ranks in enumerate(sheet.groups) for rank in ranks}
    found: dict[tuple[int, int, int, float], list[int]] = {}
    between = {
        (index, group_of[source], group_of[target])
        for index, source, target in _hand_overs(sheet.schedule)
        if group_of[source] != group_of[target]
    }
    for index, source, target in sorted(between):
        stage = sheet.plan.stages[index]
        alike = (source, target, stage.transfer_bytes, stage.hop_seconds)
        found.setdefault(alike, []).append(index)
    for (source, target, num_bytes, length), stages in sorted(found.items()):
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


def _choices(sheet: _Sheet) -> pictured.Choices:
    """The alternatives; this plan before them, unless it is one of them."""
    rows = [
        (
            one.label,
            one.description,
            format_seconds(one.step_seconds),
            f"{one.bubble:.1%}",
            format_bytes(one.memory_bytes),
            format_bytes(one.moved_bytes),
            f"{one.delay:g}",
            one.remark,
        )
        for one in sheet.plan.alternatives
    ]
    chosen = [at for at, one in enumerate(sheet.plan.alternatives) if one.remark == "chosen"]
    if chosen:
        return pictured.Choices(_COLUMNS, tuple(rows), chosen[0])
    bubble = 0.0 if sheet.plan.versions.asynchronous else sheet.timeline.bubble
    numbers = (
        format_seconds(sheet.step_seconds),
        f"{bubble:.1%}",
        format_bytes(max(sheet.rank_bytes)),
    )
    return pictured.Choices(
        _COLUMNS, (("this plan", _title(sheet.plan), *numbers, "", "", ""), *rows), 0
    )
