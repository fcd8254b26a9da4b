"""``MemoryLimits``: which layers the stages of a setting have memory for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from penstock.base.kept import kept
from penstock.core.schedule.memory import Load
from penstock.planning.partition.chain import Table
from penstock.planning.planner.setting import CopySums, Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay

_RECOMPUTES: tuple[RecomputeWay, ...] = ("none", "layers", "stage")

_FEW_ROWS = 8
"""That are looked at first where nobody knows how much a stage has memory for."""


def memory_limits(task: Task, setting: Setting) -> MemoryLimits:
    """The memory that stages of a task have in a setting; made once for all cuts."""
    known = setting.known_for(task)
    if "memory" not in known:
        known["memory"] = MemoryLimits(task, setting)
    memory: MemoryLimits = known["memory"]
    return memory


class MemoryLimits:
    """Which layers the stages of a setting have memory for, and with how much recomputing.

    Args:
        slack: bytes by which limits may be exceeded.
        shared: of a rank with several stages, whether each gets an even share of its limit;
            otherwise these have no limit.
    """

    def __init__(
        self, task: Task, setting: Setting, slack: float = 0.0, shared: bool = True
    ) -> None:
        self._task = task
        self._setting = setting
        stages = range(setting.num_stages)
        self._copies = [setting.weight_versions(stage, task.num_microbatches) for stage in stages]
        self._sums = setting.copy_sums(task)
        self._slack, self._shared = slack, shared
        self._again: dict[Hashable, Table] = {}
        self._at_rest: dict[Hashable, Table] = {}
        self._longest: dict[Hashable, int] = {}

    @cached_property
    def is_free(self) -> bool:
        """Whether nothing is limited and nothing must run twice."""
        rule = self._setting.recompute
        return rule in {"where-needed", "never"} and min(self._limits) == inf

    @cached_property
    def _limits(self) -> list[float]:
        return [self._limit(stage) for stage in range(self._setting.num_stages)]

    def _limit(self, stage: int) -> float:
        setting = self._setting
        if not setting.is_single and not self._shared:
            return inf
        stages_of = setting.schedule.stages_of
        count = max(len(stages_of[rank]) for rank in setting.schedule.ranks_of(stage))
        return min(
            (limit + self._slack) / (1 + allocator) / count
            for limit, allocator in self._task.devices.memories_of(setting.devices_of[stage])
        )

    @kept
    def kind(self, stage: int) -> Hashable:
        """Stages of one kind have the same tables."""
        if self.is_free:
            return None
        return self._limits[stage], self._key(stage, "none"), self._key(stage, "stage")

    def again_seconds(self, stage: int, num_rows: int) -> Table:
        """Seconds that a stage takes longer because it must run forward twice, with up to so much
        of what is between two of ``Task.places``; infinite where it does not fit even so. Worked
        out once for all stages of a kind."""
        kind = self.kind(stage)
        if kind not in self._again or len(self._again[kind]) < num_rows:
            self._again[kind] = self._again_seconds(stage, num_rows)
        return self._again[kind][:num_rows]

    def _again_seconds(self, stage: int, num_rows: int) -> Table:
        rule, limit = self._setting.recompute, self._limits[stage]
        again = self._task.layers.tables(num_rows)["recompute_seconds"]
        if rule in {"stage", "layers"}:
            return np.where(self.num_bytes(stage, rule, num_rows) <= limit, again, inf)
        fits = self.num_bytes(stage, "none", num_rows) <= limit
        if rule == "never":
            return np.where(fits, 0.0, inf)
        least = np.minimum(
            self.num_bytes(stage, "layers", num_rows), self.num_bytes(stage, "stage", num_rows)
        )
        return np.where(fits, 0.0, np.where(least <= limit, again, inf))

    def longest(self, stage: int) -> int:
        """The most that a stage can have of what is between two places: whatever begins at a place
        needs no less if it has more. (That the halves of a tied weight come together may spare
        memory, so of models with such weights nothing is known.)"""
        count = len(self._task.places) - 1
        if self._task.layers.ties or self._limits[stage] == inf:
            return count
        kind = self.kind(stage)
        if kind not in self._longest:
            length = min(_FEW_ROWS, count)
            while length < count and self._fitting_rows(stage, length) == length:
                length = min(2 * length, count)
            self._longest[kind] = self._fitting_rows(stage, length)
        return self._longest[kind]

    def _fitting_rows(self, stage: int, num_rows: int) -> int:
        """Of so many rows, those up to the last one in which something fits."""
        fits = np.isfinite(self.again_seconds(stage, num_rows))
        fits &= (
            np.arange(fits.shape[1]) > np.arange(num_rows)[:, None]
        )  # as far as there are stages
        return int(np.flatnonzero(fits.any(axis=1)).max(initial=-1)) + 1

    def recompute(self, stage: int, start: int, stop: int) -> RecomputeWay:
        """The recomputing that a stage with layers ``[start, stop)``, which fits, needs."""
        rule, limit = self._setting.recompute, self._limits[stage]
        if rule in {"stage", "layers"}:
            return rule
        if rule == "never" or limit == inf:
            return "none"
        if self.held_bytes(stage, "none", start, stop) <= limit:
            return "none"
        return self.lighter(stage, start, stop)

    def lighter(self, stage: int, start: int, stop: int) -> RecomputeWay:
        """The recomputing with which a stage with layers ``[start, stop)`` needs less memory."""
        ways: tuple[RecomputeWay, ...] = ("layers", "stage")
        return min(ways, key=lambda how: self.held_bytes(stage, how, start, stop))

    def held_bytes(self, stage: int, how: RecomputeWay, start: int, stop: int) -> int:
        """Bytes that a rank needs for a stage with layers ``[start, stop)``, also where these begin
        or end between the places of the tables."""
        key = (*self._key(stage, how), start, stop)
        known = self._task.cache.held
        if key not in known:
            numbers, inputs = (
                self._task.layers.numbers(start, stop),
                self._task.layers.input_bytes[start],
            )
            copies, sums, loads, *_ = key
            known[key] = int(_needed(numbers, inputs, copies, sums, loads, how))
        return known[key]

    def state_bytes(self, stage: int, how: RecomputeWay, start: int, stop: int) -> int:
        """Bytes that a rank needs for a stage with layers ``[start, stop)`` while nothing is in
        flight."""
        key = self._copies[stage], self._sums[stage], how == "layers", start, stop
        known = self._task.cache.held
        if key not in known:
            numbers = self._task.layers.numbers(start, stop)
            known[key] = int(_at_rest(numbers, self._copies[stage], self._sums[stage], how))
        return known[key]

    def within_limits(self, stage: int) -> tuple[Table, ...]:
        """``num_bytes`` of every way that is allowed, in the order of ``ways``, with whatever there
        is between two places; infinite where it does not fit."""
        count, limit = len(self._task.places) - 1, self._limits[stage]
        needed = (self.num_bytes(stage, how, count) for how in self.ways)
        return tuple(np.where(table <= limit, table, inf) for table in needed)

    @property
    def ways(self) -> tuple[RecomputeWay, ...]:
        """The ways to recompute that the setting allows."""
        rule = self._setting.recompute
        if rule == "where-needed":
            return _RECOMPUTES
        return ("none",) if rule == "never" else (rule,)

    def num_bytes(self, stage: int, how: RecomputeWay, num_rows: int) -> Table:
        """Bytes that a rank of a stage needs, as ``again_seconds``."""
        copies, sums, loads, _ = self._key(stage, how)
        tables = self._task.layers.tables(num_rows)
        key = num_rows, copies, sums, how == "layers"
        if key not in self._at_rest:
            self._at_rest[key] = _at_rest(tables, copies, sums, how)
        needed: Table = _in_flight(tables, tables["input_bytes"], loads, how)
        return needed + self._at_rest[key]

    def _key(
        self, stage: int, how: RecomputeWay
    ) -> tuple[int, CopySums, tuple[Load, ...], RecomputeWay]:
        """All of a stage that decides, with its layers, what it needs."""
        return self._copies[stage], self._sums[stage], self._loads(stage, how), how

    def _loads(self, stage: int, how: RecomputeWay) -> tuple[Load, ...]:
        return self._setting.loads(stage, again=how == "stage")


def _needed(
    numbers: Mapping[str, Any],
    inputs: Any,
    copies: int,
    summing: CopySums,
    loads: tuple[Load, ...],
    how: RecomputeWay,
) -> Any:
    """The bytes that a rank needs for one stage, as numbers, or for many at once, as tables.

    Args:
        numbers: sums over the stage's layers, by their names (as ``LayerSums`` has them).
        inputs: bytes of the stage's input.
        copies: of the weights.
        summing: what of the stage's state a rank keeps.
        loads: the worst moments of the rank.
        how: what runs again.
    """
    return _in_flight(numbers, inputs, loads, how) + _at_rest(numbers, copies, summing, how)


def _in_flight(
    numbers: Mapping[str, Any], inputs: Any, loads: tuple[Load, ...], how: RecomputeWay
) -> Any:
    """The bytes of what is in flight at the worst moment; as ``_needed``."""
    whole = numbers["again_input_bytes" if how == "layers" else "activation_bytes"]
    sizes = inputs, whole, numbers["weight_kept_bytes"]
    most: Any = 0
    for load in loads:
        held = [count * size for count, size in zip(load, sizes, strict=True) if count]
        most = np.maximum(most, sum(held)) if len(loads) > 1 else sum(held)
    return np.ceil(most)


def _at_rest(numbers: Mapping[str, Any], copies: int, summing: CopySums, how: RecomputeWay) -> Any:
    """The bytes of all else; as ``_needed``."""
    workspace = "again_workspace_bytes" if how == "layers" else "workspace_bytes"
    return summing.state_bytes(numbers, copies) + numbers["buffer_bytes"] + numbers[workspace]
