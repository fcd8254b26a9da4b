"""Memory that ops keep, and when it comes back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.base.values import amount, items_of, shown
from penstock.core.schedule.columns import CODES, KINDS, Bools, Longs, RankOps, codes_of, joined
from penstock.core.schedule.op import BACKWARD, FORWARDS, RELEASING, STASHES, Activations, Kind, Op

Curve = tuple[tuple[float, float], ...]
"""(time, held from then on)."""

Floats = npt.NDArray[np.float64]

_LARGEST_KEY = 2**62
_MANY_OPS = 1 << 15
"""That are gone through at once."""


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
) -> tuple[Bools, Floats]:
    """For each op of one rank, whether at its start, and by how much it changes what is held.

    Explicit free points count where there are any; otherwise memory comes back behind I, W and B.
    Where backwards go through the newest activations, a forward takes the place of what the one
    before it has left. Marks like [1] are the rules of ``offload``.
    """
    own = RankOps.of(ops)
    before, after = _held(own, sizes, num_slices, activations)
    change = after - before
    stashes = np.flatnonzero(own.are_of(STASHES))
    if stashes.size:
        leaving = np.where(own.are_of({Kind.LEAVE_STASH})[stashes], before[stashes], 0.0)
        written = np.concatenate(([0.0], leaving[:-1]))
        change[stashes] = change[stashes] + leaving - written  # [1]
    return own.are_of(FORWARDS | STASHES), change


def _held(
    ops: RankOps, sizes: Sizes, num_slices: int, activations: Activations
) -> tuple[Floats, Floats]:
    """How much is held of its microbatch (of its stage, where backwards go through the newest)
    before and behind each op."""
    columns, span = ops.columns, ops.span
    stages, row = np.unique(columns.stage[span], return_inverse=True)
    table = np.full((len(stages), len(KINDS)), np.nan)
    for (stage, kind), size in _left_behind(ops, sizes, num_slices).items():
        table[np.searchsorted(stages, stage), CODES[kind]] = size
    left = table[row, columns.kind[span]]
    holders = [columns.stage[span]]
    if activations == "own":
        holders = [columns.slice[span], columns.microbatch[span], columns.stage[span]]
    # 1. The ops of one holder, one after the other.
    order = np.lexsort(holders)
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.logical_or.reduce([np.diff(holder[order]) != 0 for holder in holders])
    # 2. An op of which nothing is said leaves as much as the one before it; the first one, nothing.
    known = ~np.isnan(left[order])
    source = np.maximum.accumulate(np.where(known | begins, np.arange(len(order)), 0))
    filled = np.where(known, left[order], 0.0)[source]
    before, after = np.zeros((2, len(order)))
    after[order] = filled
    before[order[1:]] = np.where(begins[1:], 0.0, filled[:-1])
    return before, after


def _left_behind(ops: RankOps, sizes: Sizes, num_slices: int) -> Mapping[tuple[int, Kind], float]:
    """By stage and kind, what is held of a microbatch behind an op of a rank; nothing is said where
    that is as much as before."""
    kinds, recomputed = ops.kinds, ops.stages_with({Kind.RECOMPUTE})
    frees_part = Kind.FREE_INPUT_PART if Kind.FREE in kinds else Kind.BACKWARD_INPUT
    frees_rest = {Kind.FREE} if Kind.FREE in kinds else RELEASING
    left = {}
    for stage in ops.stages_with(kinds):
        forward = sizes.stage_input if stage in recomputed else sizes.activation
        left[stage, Kind.FORWARD] = forward[stage] / num_slices
        left[stage, Kind.RECOMPUTE] = sizes.activation[stage] / num_slices
        left[stage, frees_part] = sizes.kept_for_weight[stage] / num_slices
        left.update(dict.fromkeys(((stage, kind) for kind in frees_rest), 0.0))
        left[stage, Kind.LEAVE_STASH] = 0.0
        left[stage, Kind.FETCH_STASH] = sizes.activation[stage] / num_slices  # [2]
    return left


def curve(timed: Iterable[tuple[float, float, bool, float]]) -> Curve:
    """How much is held over time, from (start, end, whether at the start, change) of each op."""
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
    known: dict[tuple[bytes, ...], float] = {}
    most = []
    for ops in ranks:
        own = RankOps.of(ops)
        does = _does(own)
        if does not in known:
            known[does] = _most_held(own, sizes, num_slices, activations)
        most.append(known[does])
    return tuple(most)


def _does(ops: RankOps) -> tuple[bytes, ...]:
    """All of some ops but how their microbatches are numbered: copies of a rank do the same."""
    stage, kind, microbatch, part = ops.columns.fields(ops.span)
    order = np.unique(microbatch, return_inverse=True)[1]
    return stage.tobytes(), kind.tobytes(), order.tobytes(), part.tobytes()


def _most_held(ops: Sequence[Op], sizes: Sizes, num_slices: int, activations: Activations) -> float:
    own = RankOps.of(ops)
    if activations == "newest" and len(own.stages_with(own.kinds)) == 1:
        # Each op leaves what it leaves, whatever was there before.
        left = _left_behind(own, sizes, num_slices)
        return max(left[stage, kind] for stage, kind in left if kind in own.kinds)
    _, change = changes(own, sizes, num_slices, activations)
    # One after the other, as many small numbers are added op by op: to the bit.
    return max(0.0, float(change.cumsum().max(initial=0.0)))


class Load(NamedTuple):
    """The load of a rank at one moment.

    Attributes:
        inputs: microbatches of which it has the stage's input only, and will run forward again.
        whole: that keep everything.
        for_weight: that keep what the weight gradient needs.
    """

    inputs: float = 0
    whole: float = 0
    for_weight: float = 0


SizesOfOne = tuple[float, float, float]
"""Bytes that a microbatch keeps at a stage: its input only, all, or what the weight gradient
needs."""

_CHANGES = {
    Kind.FORWARD: (1, 0),
    Kind.BACKWARD: (-1, 0),
    Kind.BACKWARD_INPUT: (-1, 1),
    Kind.BACKWARD_WEIGHT: (0, -1),
}
_STEPS = np.array([_CHANGES.get(kind, (0, 0)) for kind in KINDS])
"""By how much ops of each kind change what is held whole, and for the weight gradient."""


@dataclass(frozen=True, eq=False)
class Moments:
    """All that a rank ever holds, whichever of its stages run forward a second time: the
    microbatches of these wait as their inputs alone, but for one right before each backward.

    Attributes:
        stages: those that the rank has.
        counts: how many microbatches it holds, and how, if nothing runs again: a row per moment
            that differs from all others, and two columns per stage, for those that keep everything
            and those that keep what the weight gradient needs.
        before: the same of the moments right before the backwards of each stage.
    """

    stages: tuple[int, ...]
    counts: Floats
    before: Mapping[int, Floats]

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankOps]) -> list[Moments]:
        """Those of some ranks: compute only, of whole microbatches, none of which runs again."""
        counted: list[Moments] = []
        while len(counted) < len(ranks):
            ends = list(accumulate(map(len, ranks[len(counted) :])))
            count = max(bisect_right(ends, _MANY_OPS), 1)
            counted += cls._of_few(ranks[len(counted) : len(counted) + count])
        return counted

    @classmethod
    def _of_few(cls, ranks: Sequence[RankOps]) -> list[Moments]:
        """Those of so many ranks that one table has room for all of their ops."""
        numbers, stages_of = np.arange(len(ranks)), [ops.stages for ops in ranks]
        rank = np.repeat(numbers, [len(ops) for ops in ranks])
        stage, kind, *_ = joined(ops.columns.fields(ops.span) for ops in ranks)
        of_ranks = np.split(stage, np.searchsorted(rank, numbers[1:]))
        places = np.concatenate(list(map(np.searchsorted, stages_of, of_ranks)))
        # Each rank begins with a row in which it holds nothing.
        behind = np.arange(len(rank)) + rank + 1
        held = np.zeros((len(rank) + len(ranks), max(map(len, stages_of)), 2), np.int64)
        held[behind, places] = _STEPS[kind]
        rows = held.reshape(len(held), -1).cumsum(axis=0)
        begins = np.searchsorted(rank, numbers) + numbers
        owner = np.repeat(numbers, np.diff([*begins, len(rows)]))
        rows -= rows[begins][owner]
        backwards = codes_of(BACKWARD)[kind]
        counts = _distinct_by(owner, rows)
        most = 1 + int(stage.max(initial=0))
        before = _distinct_by((rank * most + stage)[backwards], rows[behind[backwards] - 1])
        return [
            cls(
                stages,
                counts[number][:, : 2 * len(stages)],
                {
                    own: before[number * most + own][:, : 2 * len(stages)]
                    for own in stages
                    if number * most + own in before
                },
            )
            for number, stages in enumerate(stages_of)
        ]

    def rows(self, again: Collection[int] = ()) -> Longs:
        """A row per moment that differs from all others, ascending, and three columns per stage, as
        ``Load`` has them.

        Args:
            again: the stages that run forward a second time.
        """
        twice = np.array([stage in again for stage in self.stages], np.bool_)
        parts = [_as_loads(self.counts, twice)]
        for place in np.flatnonzero(twice).tolist():
            part = _as_loads(self.before[self.stages[place]], twice)
            part[:, 3 * place : 3 * place + 2] += (-1, 1)
            parts.append(part)
        return distinct_rows(np.concatenate(parts))

    def most_bytes(self, sizes: Callable[[int], SizesOfOne], again: Collection[int]) -> float:
        """Bytes that the rank holds at its worst moment.

        Args:
            sizes: what a microbatch keeps at a stage.
            again: the stages that run forward a second time.
        """
        of_stages = {stage: sizes(stage) for stage in self.stages}
        flat = [
            size
            for stage, (inputs, whole, for_weight) in of_stages.items()
            for size in (inputs if stage in again else whole, for_weight)
        ]
        most = float((self.counts @ flat).max())
        for stage in self.before.keys() & again:
            inputs, whole, _ = of_stages[stage]
            most = max(most, float((self.before[stage] @ flat).max()) + whole - inputs)
        return most


def _distinct_by(labels: Longs, rows: Longs) -> dict[int, Floats]:
    """The rows of each label without those that repeat others."""
    if not len(rows):
        return {}
    distinct = distinct_rows(np.column_stack([labels, rows]))
    begins = np.flatnonzero(np.diff(distinct[:, 0]))
    parts = np.split(distinct.astype(np.float64), begins + 1)
    return {int(part[0, 0]): part[:, 1:] for part in parts}


def _as_loads(counts: Floats, again: Bools) -> Longs:
    """Rows of ``Moments`` with three columns per stage.

    Args:
        again: for each stage, whether it runs forward a second time.
    """
    rows = np.zeros((len(counts), len(again), 3), np.int64)
    rows[:, :, 0], rows[:, :, 1] = counts[:, ::2] * again, counts[:, ::2] * ~again
    rows[:, :, 2] = counts[:, 1::2]
    return rows.reshape(len(counts), -1)


def distinct_rows(rows: Longs) -> Longs:
    """Rows without those that repeat others, ascending: numpy's ``unique`` compares rows byte by
    byte, and takes many times as long.

    >>> distinct_rows(np.array([[2, -1], [1, 5], [2, -1]])).tolist()
    [[1, 5], [2, -1]]
    """
    distinct: Longs = rows[np.unique(_keys(rows), return_index=True)[1]]
    return distinct


def _keys(rows: Longs) -> Longs:
    """A number for each row, in the order of the rows."""
    least = rows.min(axis=0)
    widths = (rows.max(axis=0) - least + 1).tolist()
    keys: Longs
    if prod(widths) < _LARGEST_KEY:
        keys = (rows - least) @ np.array([prod(widths[k + 1 :]) for k in range(len(widths))], int)
        return keys
    half = len(widths) // 2
    first, second = (
        np.unique(_keys(part), return_inverse=True)[1] for part in (rows[:, :half], rows[:, half:])
    )
    keys = first * (second.max() + 1) + second
    return keys


def loads(
    moments: Moments, again: Collection[int] = (), activations: Activations = "own"
) -> tuple[Load, ...]:
    """The loads of a rank at its worst moments: whatever the sizes are, the most that is held is
    held at one of these.

    Args:
        moments: of one rank with one stage.
        again: its stage, if that runs forward a second time.
        activations: which of them backwards go through.
    """
    if activations == "newest":
        return (Load(whole=1),)
    if not moments.stages:
        return (Load(),)
    if not moments.counts[:, 1].any():
        # Backwards are whole: all that wait, or one of the most before a backward and the others.
        (stage,), most = moments.stages, moments.counts[:, 0].max()
        if stage not in again:
            return (Load(whole=most),)
        waiting = moments.before[stage][:, 0].max() - 1
        return Load(waiting, whole=1), Load(most)
    reached = moments.rows(again)[::-1]  # whoever exceeds another comes before it
    differing = np.flatnonzero(reached.min(axis=0) < reached.max(axis=0))
    if len(differing) < reached.shape[1]:
        # Of one or two that differ, who has more of the last than all before is exceeded by none.
        last = reached[:, differing[-1]] if differing.size else reached[:, -1]
        most_before = np.maximum.accumulate(last)[:-1]
        kept = np.concatenate([[True], last[1:] > most_before])
        ends = differing[[0, -1]] if differing.size else [0, 0]
        rows = _corners(reached[kept].tolist(), *ends)
        return tuple(Load(*row) for row in reversed(rows))
    # Where few are whole at a time: none before has as many of these, and of the last as many.
    worst: list[list[int]] = []
    for whole in sorted({*reached[:, 1].tolist()}):
        last = np.where(reached[:, 1] >= whole, reached[:, 2], -1)
        most_before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]])
        kept = (reached[:, 1] == whole) & (last > most_before)
        worst += _corners(reached[kept].tolist(), 0, 2)
    return tuple(Load(*row) for row in sorted(worst))


def _corners(rows: list[list[int]], first: int, last: int) -> list[list[int]]:
    """Rows without those that any weights of two columns make less than one beside them.

    Args:
        rows: in which the first column falls and the last one rises.

    >>> _corners([[2, 0], [1, 1], [0, 2]], 0, 1)
    [[2, 0], [0, 2]]
    """
    chain: list[list[int]] = []
    for row in rows:
        while len(chain) > 1:
            before, between = chain[-2:]
            rises = (row[last] - before[last]) * (between[first] - before[first])
            if rises > (between[last] - before[last]) * (row[first] - before[first]):
                break
            chain.pop()
        chain.append(row)
    return chain


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
    own = RankOps.of(ops)
    if Kind.RECOMPUTE in own.kinds or (own.kinds and activations == "newest"):
        sizes = even_sizes(1 + max(own.stages_with(own.kinds)))
        return _most_held(own, sizes, 1, activations)
    frees: Collection[Kind] = {Kind.FREE} if Kind.FREE in own.kinds else RELEASING
    steps = own.are_of({Kind.FORWARD}).astype(np.int64) - own.are_of(frees)
    return int(steps.cumsum().max(initial=0))


def units(ranks: Iterable[Sequence[Op]], num_slices: int = 1) -> tuple[int, ...]:
    """Per rank, how many of its stages one microbatch visits: all of them, unless stages have
    copies elsewhere."""
    return tuple(max(1, _most_forwards(RankOps.of(ops)) // num_slices) for ops in ranks)


def _most_forwards(ops: RankOps) -> int:
    visits = ops.columns.microbatch[ops.span][ops.are_of({Kind.FORWARD})]
    return int(np.unique(visits, return_counts=True)[1].max(initial=0))
