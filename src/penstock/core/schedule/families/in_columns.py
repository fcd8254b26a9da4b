"""Orders of ranks as columns, in a few numpy calls for a rank: what ``ops`` of each order says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.schedule.columns.columns import CODES, Columns, Fields, Ints, codes_of
from penstock.core.schedule.families.alternate import Turns
from penstock.core.schedule.families.layout import Order
from penstock.core.schedule.families.phases import Phases
from penstock.core.schedule.families.slots import Slots
from penstock.core.schedule.families.stretched import Stretched
from penstock.core.schedule.op import BACKWARD, Kind


def columns_of(orders: Sequence[Order], num_microbatches: int | None) -> Columns:
    """The columns of a schedule.

    Args:
        orders: one for each rank.
        num_microbatches: leave out what is for later ones.
    """
    ranks = [_only(order.fields(), num_microbatches) for order in orders]
    first = np.cumsum([0, *(len(stage) for stage, *_ in ranks)], dtype=np.int64)
    stages, kinds, microbatches, parts = zip(*ranks, strict=True)
    # Where nothing is sliced, one 0 stands for all.
    part = np.concatenate(parts) if any(map(np.any, parts)) else np.zeros(1, np.int32)
    joined = np.concatenate(stages), np.concatenate(kinds), np.concatenate(microbatches)
    return Columns(first, *joined, np.broadcast_to(part, len(joined[0])))


def _only(fields: Fields, num_microbatches: int | None) -> Fields:
    if num_microbatches is None:
        return fields
    stage, kind, microbatch, part = fields
    kept = microbatch < num_microbatches
    return stage[kept], kind[kept], microbatch[kept], part[kept]


def fields_of_turns(turns: Turns) -> Fields:
    """As ``Turns.ops``: each line's ops are put where they stand."""
    count = len(turns)
    stage, microbatch = np.empty((2, count), np.int32)
    kind, part = np.empty(count, np.int8), np.zeros(count, np.int32)
    for line, places in zip(turns.lines, _places(turns), strict=True):
        stage[places] = line.stage
        if line.laps:
            stage[places] += line.per_lap * _numbers(line.laps)
        kind[places] = CODES[line.kind]
        microbatch[places] = _numbers(line.microbatches)
        if line.slices:
            part[places] = _numbers(line.slices)
    return stage, kind, microbatch, part


def fields_of_slots(slots: Slots) -> Fields:
    """As ``Slots.ops``; lines without laps and slices."""
    lines = [timed.line for timed in slots.lines]
    counts = [len(line) for line in lines]
    order = np.concatenate([_numbers(own.starts) + own.offset for own in slots.lines]).argsort()
    stage = np.repeat(np.array([line.stage for line in lines], np.int32), counts)
    kind = np.repeat(np.array([CODES[line.kind] for line in lines], np.int8), counts)
    microbatch = np.concatenate([_numbers(line.microbatches) for line in lines])
    return stage[order], kind[order], microbatch[order], np.zeros(len(order), np.int32)


def fields_of_phases(phases: Phases) -> Fields:
    """As ``phases.unroll``."""
    names = sorted({step for pattern, _ in phases.phases for step in pattern.split()})
    steps = np.concatenate(
        [
            np.tile(np.array([*map(names.index, pattern.split())], np.int8), max(repeats, 0))
            for pattern, repeats in phases.phases
        ]
    )
    kind = np.array([CODES[Kind(name[0])] for name in names], np.int8)[steps]
    stages = [phases.stages[int(name[1:] or 0)] for name in names]
    stage = np.array(stages, np.int32)[steps]
    microbatch = np.zeros(len(steps), np.int32)
    # I and B are two ways to do the same microbatch's backward: one count for both.
    for line in codes_of({Kind.FORWARD}), codes_of(BACKWARD):
        for own in phases.stages:
            turns = np.flatnonzero(line[kind] & (stage == own))
            microbatch[turns] = np.arange(len(turns))
    inputs, weights = (
        np.flatnonzero(kind == CODES[half]) for half in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    owed = inputs[: len(weights)]
    stage[weights], microbatch[weights] = stage[owed], microbatch[owed]
    return stage, kind, microbatch, np.zeros(len(steps), np.int32)


def fields_of_stretched(order: Stretched) -> Fields:
    """As ``Stretched.ops``: whose number each op has, and by how much it is later."""
    count, length = len(order.short), order.end - order.begin
    tail = count - order.end
    middle = np.tile(np.arange(order.begin, order.end), order.times)
    numbers = np.concatenate((np.arange(order.begin), middle, np.arange(order.end, count)))
    turns = np.repeat(np.arange(order.times, dtype=np.int32), length)
    turn = np.concatenate((np.zeros(order.begin, np.int32), turns, np.full(tail, order.times - 1)))
    stages, kinds, microbatches, _ = zip(*order.short, strict=True)
    kind = np.array([*map(CODES.__getitem__, kinds)], np.int8)[numbers]
    microbatch = np.array(microbatches, np.int32)[numbers]
    microbatch += (turn * order.microbatches).astype(np.int32)
    return np.array(stages, np.int32)[numbers], kind, microbatch, np.zeros(len(kind), np.int32)


def _places(turns: Turns) -> list[Ints]:
    """Where the ops of each line stand."""
    warm_up = min(turns.warm_up, len(turns.lines[0]))
    lengths = [len(line) for line in turns.lines]
    lengths[0] -= warm_up
    skips = (0, 0, turns.delay)[: len(lengths)]
    places = []
    for index, (own, skipped) in enumerate(zip(lengths, skips, strict=True)):
        turn = np.arange(skipped, skipped + own, dtype=np.int32)
        place = np.full(own, warm_up, np.int32)
        for other, (length, skip) in enumerate(zip(lengths, skips, strict=True)):
            # In each turn, the lines before have gone once more than this one.
            place += np.clip(turn - skip + (other < index), 0, length)
        places.append(place)
    places[0] = np.concatenate((np.arange(warm_up, dtype=np.int32), places[0]))
    return places


def _numbers(values: Sequence[int]) -> Ints:
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=np.int32)
    return np.array(values, np.int32)
