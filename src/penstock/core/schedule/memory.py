"""What ops keep in memory, and when it comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import amount, items_of, shown
from penstock.core.schedule.columns.rank_ops import RankOps, kinds_in, stages_with
from penstock.core.schedule.op import FORWARDS, RELEASING, STASHES, Kind, Op
from penstock.core.schedule.schedule import Activations

Curve = tuple[tuple[float, float], ...]
"""(time, held from then on)."""


@dataclass(frozen=True)
class Sizes:
    """Bytes (or any unit) that one microbatch keeps at each stage, one number per stage.

    Attributes:
        activation: from the forward until the backward.
        kept_for_weight: from I until W: the part of ``activation`` that the weight gradient needs,
            and the gradients of outputs, so that it can be more than ``activation``. As much by
            default.
        stage_input: what is kept instead of ``activation`` until a recompute. Nothing by default.

    Raises:
        InputError: the numbers differ in count, or are negative.
    """

    activation: Sequence[float]
    kept_for_weight: Sequence[float] = ()
    stage_input: Sequence[float] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _numbers(field.name, getattr(self, field.name)))
        kept = self.kept_for_weight or self.activation
        object.__setattr__(self, "kept_for_weight", kept)
        given = self.stage_input or (0.0,) * len(self.activation)
        object.__setattr__(self, "stage_input", given)
        for field in fields(self):
            numbers = getattr(self, field.name)
            if len(numbers) != len(self.activation):
                raise InputError(
                    f"sizes: {field.name} has {len(numbers)} numbers, but activation has "
                    f"{len(self.activation)}; give one per stage"
                )

    def check_stages(self, num_stages: int) -> None:
        """Raise ``InputError`` unless there is a number for each of ``num_stages`` stages."""
        if len(self.activation) != num_stages:
            raise InputError(
                f"sizes: there are {len(self.activation)} numbers, but the schedule has "
                f"{num_stages} stages; give one per stage"
            )


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    numbers = items_of(values)
    if numbers is None:
        raise InputError(f"sizes: {name} is {shown(values)}; give a list with one number per stage")
    return tuple(amount(f"sizes: {name}", number) for number in numbers)


def even_sizes(num_stages: int) -> Sizes:
    """Every stage keeps 1 until W."""
    return Sizes((1.0,) * num_stages)


def changes(
    ops: Sequence[Op], sizes: Sizes, num_slices: int = 1, activations: Activations = "own"
) -> Iterator[tuple[bool, float]]:
    """For each op of one rank, (whether at its start, by how much it changes what is held).

    Explicit free points count where there are any; otherwise memory comes back behind I, W and B.
    Where backwards go through the newest activations, a forward takes the place of what the one
    before it has left. Marks like [1] are the rules of ``offload``.
    """
    left = _left_behind(ops, sizes, num_slices)
    held: dict[object, float] = {}
    leaving = 0.0
    for op in ops:
        holder = op.stage if activations == "newest" else op._replace(kind=Kind.FORWARD)
        before = held.get(holder, 0.0)
        after = held[holder] = left.get(op[:2], before)
        if op.kind in STASHES:
            written, leaving = leaving, before if op.kind is Kind.LEAVE_STASH else 0.0  # [1]
            yield True, after - before + leaving - written
        else:
            yield op.kind in FORWARDS, after - before


def _left_behind(ops: Sequence[Op], sizes: Sizes, num_slices: int) -> dict[tuple[int, Kind], float]:
    """By stage and kind, what is held of a microbatch behind an op of a rank; nothing is said where
    that is as much as before."""
    kinds, recomputed = kinds_in(ops), stages_with({Kind.RECOMPUTE}, ops)
    frees_part = Kind.FREE_INPUT_PART if Kind.FREE in kinds else Kind.BACKWARD_INPUT
    frees_rest = {Kind.FREE} if Kind.FREE in kinds else RELEASING
    left = {}
    for stage in stages_with(kinds, ops):
        forward = sizes.stage_input if stage in recomputed else sizes.activation
        left[stage, Kind.FORWARD] = forward[stage] / num_slices
        left[stage, Kind.RECOMPUTE] = sizes.activation[stage] / num_slices
        left[stage, frees_part] = sizes.kept_for_weight[stage] / num_slices
        left.update(dict.fromkeys(((stage, kind) for kind in frees_rest), 0.0))
        left[stage, Kind.LEAVE_STASH] = 0.0
        left[stage, Kind.FETCH_STASH] = sizes.activation[stage] / num_slices  # [2]
    return left


def curve(timed: Iterable[tuple[float, float, bool, float]]) -> Curve:
    """What is held over time, from (start, end, whether at the start, change) of each op."""
    held, points = 0.0, [(0.0, 0.0)]
    for start, end, at_start, change in timed:
        if change:
            held += change
            points.append((start if at_start else end, held))
    return tuple(points)


def peaks(
    ranks: Iterable[Sequence[Op]],
    sizes: Sizes,
    num_slices: int = 1,
    activations: Activations = "own",
) -> tuple[float, ...]:
    """Per rank, the most that is held at once. It follows from the order of the ops, and from which
    activations backwards go through."""
    return tuple(_most_held(ops, sizes, num_slices, activations) for ops in ranks)


def _most_held(ops: Sequence[Op], sizes: Sizes, num_slices: int, activations: Activations) -> float:
    if activations == "newest" and len(stages_with(kinds_in(ops), ops)) == 1:
        # Each op leaves what it leaves, whatever was there before.
        left = _left_behind(ops, sizes, num_slices)
        return max(left[stage, kind] for stage, kind in left if kind in kinds_in(ops))
    if isinstance(ops, RankOps) and activations == "own" and not STASHES & set(kinds_in(ops)):
        return ops.most_held(_left_behind(ops, sizes, num_slices))
    steps = changes(ops, sizes, num_slices, activations)
    return max(accumulate((change for _, change in steps), initial=0.0))


class Load(NamedTuple):
    """What a rank holds at one moment.

    Attributes:
        inputs: microbatches of which it has the stage's input only, and will run forward again.
        whole: that keep everything.
        for_weight: that keep what the weight gradient needs.
    """

    inputs: float = 0
    whole: float = 0
    for_weight: float = 0


_CHANGES = {
    Kind.RECOMPUTE: (-1, 1, 0),
    Kind.BACKWARD: (0, -1, 0),
    Kind.BACKWARD_INPUT: (0, -1, 1),
    Kind.BACKWARD_WEIGHT: (0, 0, -1),
}


def loads(ops: Sequence[Op], activations: Activations = "own") -> tuple[Load, ...]:
    """What a rank holds at its worst moments: whatever the sizes are, the most that is held is held
    at one of these.

    Args:
        ops: those of one rank with one stage: compute only, whole microbatches.
        activations: which of them backwards go through.
    """
    if activations == "newest":
        return (Load(whole=1),)
    again = any(op[1] is Kind.RECOMPUTE for op in ops)
    forward = (1, 0, 0) if again else (0, 1, 0)
    now, reached = Load(), {Load()}
    for op in ops:
        change = forward if op[1] is Kind.FORWARD else _CHANGES[op[1]]
        now = Load(now[0] + change[0], now[1] + change[1], now[2] + change[2])
        reached.add(now)
    worst: list[Load] = []
    for load in sorted(reached, reverse=True):  # whoever exceeds another comes before it
        if not any(all(a >= b for a, b in zip(bad, load, strict=True)) for bad in worst):
            worst.append(load)
    return tuple(reversed(worst))


def peak_activations(
    ranks: Sequence[Sequence[Op]], num_slices: int = 1, activations: Activations = "own"
) -> tuple[float, ...]:
    """Per rank, the most microbatches whose activations are held at once, in microbatches of the
    rank's layers; one counts from its forward (or its recompute) until its weight gradient is done
    (or, where that is explicit, until it is freed), or until a newer one takes its place where
    backwards go through the newest."""
    counts = (_most_in_flight(ops, activations) for ops in ranks)
    shares = units(ranks, num_slices)
    return tuple(count / (num_slices * unit) for count, unit in zip(counts, shares, strict=True))


def _most_in_flight(ops: Sequence[Op], activations: Activations) -> float:
    kinds = kinds_in(ops)
    if Kind.RECOMPUTE in kinds or (kinds and activations == "newest"):
        return _most_held(ops, even_sizes(1 + max(stages_with(kinds, ops))), 1, activations)
    # Counting needs no dictionary of microbatches: ten times as fast, for schedules of millions.
    frees = {Kind.FREE} if Kind.FREE in kinds else RELEASING
    steps = {Kind.FORWARD: 1, **dict.fromkeys(frees, -1)}
    if isinstance(ops, RankOps):
        return ops.most(steps)
    return max(accumulate((steps.get(op[1], 0) for op in ops), initial=0))


def units(ranks: Iterable[Sequence[Op]], num_slices: int = 1) -> tuple[int, ...]:
    """Per rank, how many of its stages one microbatch visits: all of them, unless stages have
    copies elsewhere."""
    return tuple(max(1, _most_forwards(ops) // num_slices) for ops in ranks)


def _most_forwards(ops: Sequence[Op]) -> int:
    """The most forwards that one microbatch has on a rank."""
    if isinstance(ops, RankOps):
        return ops.most_named(Kind.FORWARD)
    visits = Counter(op[2] for op in ops if op[1] is Kind.FORWARD)
    return max(visits.values(), default=0)
