"""``hand_over``: a plan as another engine takes it, with notes on what that does otherwise.

What an engine does not do is looked up (``capabilities``); where it only costs time or memory, the
plan is changed to what the engine then performs, and the simulator says what that costs; where
something else would be trained, the plan is refused and the nearest one is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple, Protocol

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.base.values import shown
from penstock.core.graph import LayerGraph
from penstock.planning.handover.capabilities import READ, Capabilities, Limit, capabilities_of
from penstock.planning.handover.described import Described
from penstock.planning.handover.properties import PROPERTIES
from penstock.planning.plans import Plan
from penstock.planning.plans.handed_over import HandOver
from penstock.planning.plans.stage_plan import sharing_ranks
from penstock.planning.plans.table import family_title

_MODULES = {
    "torch": "torch_pipelining",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
}
"""By engine, the module here that writes for it, and perhaps reads what its users have."""

_SAME = 0.005
"""Relative: a difference in time or memory that is not worth a number."""


class Lines(NamedTuple):
    """What an engine's module writes.

    Attributes:
        files: by name, their texts; the first is what users paste.
        notes: what else they should know, in sentences.
    """

    files: dict[str, str]
    notes: tuple[str, ...] = ()


class EngineModule(Protocol):
    """A module here that knows an engine's words."""

    def write(self, plan: Plan) -> Lines:
        """A plan that the engine performs as it is, in its words.

        Raises:
            InputError: the plan's layers are none that the engine knows.
        """

    def read(self, config: object, graph: LayerGraph, num_devices: int | None) -> Described:
        """The plan that a config of the engine's describes, for a model of these layers.

        Args:
            num_devices: of the whole job; ``None`` where nobody says.

        Raises:
            InputError: the config contradicts itself or the model.
        """


def described(engine: str, config: object, graph: LayerGraph, num_devices: int | None) -> Described:
    """What a config of another engine says of a plan for a model.

    Raises:
        InputError: its configs are not read here, or it contradicts itself or the model.
    """
    if engine not in READ:
        raise InputError(
            f"configs of {shown(engine)} are not read here; take one of {', '.join(READ)}"
        )
    return engine_module(engine).read(config, graph, num_devices)


def hand_over(plan: Plan, engine: str) -> HandOver:
    """A plan as another engine takes it: stages, degrees, microbatches, schedule, recomputation.

    Args:
        engine: ``"torchtitan"``, ``"megatron"``, ``"automodel"``, ``"deepspeed"`` or ``"torch"``.

    Raises:
        PlanError: the engine would train something else by the plan, or not at all; the property
            that stands in the way is named, and the nearest plan without.
        InputError: no such engine, or the plan's layers are none that the engine knows.
    """
    able = capabilities_of(engine)
    if sharing_ranks(plan.stages) == "context":
        raise PlanError(
            f"the plan's devices divide sequences (context_ranks), which is not written for "
            f"{able.title}; plan without context_ranks, and set its own degree"
        )
    steps = list(_changes(plan, able))
    refused = [step for step in steps if step.limit.outcome == "refused" or step.after is None]
    if refused:
        raise PlanError(_refusal(plan, engine, refused))
    performed, notes = plan, []
    for step in steps:
        assert step.after is not None
        notes.append(f"{step.said_of(able.title)}: {_cost(step.before, step.after)}")
        performed = step.after
    _check_fits(plan, performed, able)
    lines = engine_module(engine).write(performed)
    return HandOver(engine, lines.files, (*notes, *lines.notes), performed)


def engine_module(engine: str) -> EngineModule:
    """The module that knows an engine's words."""
    module: EngineModule = importlib.import_module(f"{__package__}.{_MODULES[engine]}")
    return module


class _Substitution(NamedTuple):
    """A property that an engine lacks, and a plan before and after it is taken away."""

    words: str
    limit: Limit
    before: Plan
    after: Plan | None

    def said_of(self, title: str) -> str:
        """The property and the limit, in one sentence."""
        return f"{self.words}, but {title} {self.limit.reason} ({self.limit.source})"


def _changes(plan: Plan, able: Capabilities) -> Iterator[_Substitution]:
    """All that must change until an engine performs a plan; the last one may be impossible."""
    for name, known in PROPERTIES.items():
        limit = able.limits.get(name)
        words = known.where(plan, able) if limit is not None else ""
        if limit is None or not words:
            continue
        after = known.without(plan, able)
        yield _Substitution(words, limit, plan, after)
        if after is None:
            return
        plan = after


def nearest(plan: Plan, engine: str) -> Plan | None:
    """The plan nearest to another one that an engine performs; ``None`` where none is near."""
    after: Plan | None = plan
    for step in _changes(plan, capabilities_of(engine)):
        after = step.after
    return after


def _refusal(plan: Plan, engine: str, refused: Sequence[_Substitution]) -> str:
    able = capabilities_of(engine)
    parts = [step.said_of(f"{able.title} {able.version}") for step in refused]
    ask = f'ask for a plan that it performs with pk.plan(…, engine="{engine}")'
    other = nearest(plan, engine)
    if other is not None:
        ask = (
            f"the nearest plan that it performs is {_name(other)}: "
            f"{format_seconds(other.step_seconds)} a step instead of "
            f"{format_seconds(plan.step_seconds)}; {ask}"
        )
    return f"{'; '.join(parts)}; {ask}"


def _name(plan: Plan) -> str:
    family = family_title(plan.schedule, plan.given_replicas, plan.versions)
    return f"{family} with {count_of(len(plan.stages), 'stage')}"


def _cost(before: Plan, after: Plan) -> str:
    """The time and memory of a plan beside another one's, by the simulator."""
    words = [
        _changed(before.step_seconds, after.step_seconds, format_seconds, "a step"),
        _changed(
            max(before.rank_bytes), max(after.rank_bytes), format_bytes, "on the fullest rank"
        ),
    ]
    changed = [part for part in words if part]
    return ", ".join(changed) if changed else "that costs nothing, by the simulator"


def _changed(before: float, after: float, text: Callable[[float], str], whose: str) -> str:
    if abs(after - before) <= _SAME * max(before, after):
        return ""
    return f"{text(after)} instead of {text(before)} {whose}"


def _check_fits(plan: Plan, performed: Plan, able: Capabilities) -> None:
    """Raise ``PlanError`` if a plan fits and what the engine makes of it does not."""
    if performed is plan or not plan.leaders or performed.num_ranks != plan.num_ranks:
        return
    for rank, device in enumerate(plan.leaders):
        limit = device.memory_bytes or inf
        if plan.rank_bytes[rank] <= limit < performed.rank_bytes[rank]:
            raise PlanError(
                f"rank {rank} has {format_bytes(int(limit))}, but needs "
                f"{format_bytes(performed.rank_bytes[rank])} where {able.title} performs "
                f"{_name(performed)}; ask for a plan that fits with "
                "pk.plan(…, engine=…)"
            )
