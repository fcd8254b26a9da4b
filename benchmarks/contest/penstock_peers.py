"""Penstock's pipelines as peers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import penstock as pk
from benchmarks.common.works import Work
from benchmarks.contest.peers import Peer
from penstock import schedules
from penstock.core.schedule import Schedule
from penstock.core.versions import Flush, Policy
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.engine.run.drive.joining import TransportName
from penstock.engine.stage.backends import Backend
from penstock.planning.plans import Plan, StagePlan

NUM_RANKS = 2


def schedule_for(family: str, num_microbatches: int) -> Schedule:
    """The schedule of two ranks."""
    return schedules.build(family, num_ranks=NUM_RANKS, num_microbatches=num_microbatches)


def plan_for(work: Work, model: nn.Module, family: str, versions: Policy | None = None) -> Plan:
    """The same cuts as the peers', whatever a planner would choose; with the family's usual
    policy if no other is given."""
    layers = spine_of(model)
    schedule = schedule_for(family, work.num_microbatches)
    rank_of = {stage: rank for rank, held in enumerate(schedule.stages_of) for stage in held}
    return Plan(
        model=spine_fingerprint(layers),
        schedule=family,
        versions=Flush() if versions is None else versions,
        num_microbatches=work.num_microbatches,
        stages=tuple(
            StagePlan(layers=tuple(layers[index].name for index in indices), rank=rank_of[stage])
            for stage, indices in enumerate(work.stages(schedule.num_stages))
        ),
    )


def penstock_peer(
    family: str,
    transport: TransportName,
    *,
    ahead: bool = False,
    versions: Policy | None = None,
    compile: bool | Backend = False,
) -> Callable[[Work], Peer]:
    """A peer with a schedule; with threads it runs on the calling rank alone.

    Args:
        family: of schedules.
        transport: as ``Pipeline`` takes it.
        ahead: whether several steps are given to ``Pipeline.steps``, which begins one before all
            ranks have ended the last.
        versions: which weights passes read, of a family that never flushes.
        compile: as ``Pipeline`` takes it.
    """

    def build(work: Work) -> Peer:
        model = work.build_model()
        pipeline = pk.Pipeline(
            model,
            plan_for(work, model, family, versions),
            loss=work.loss,
            optimizer=work.build_optimizer,
            transport=transport,
            compile=compile,
            record=False,  # torch's runtime exchanges no records either
        )
        held = {layer.name: layer.module for s in pipeline.stages.values() for layer in s.layers}
        indices = [i for i, layer in enumerate(spine_of(model)) if layer.name in held]
        return Peer(
            nn.Sequential(*held.values()),
            indices,
            pipeline.step,
            steps=pipeline.steps if ahead else None,
            same_order=compile is False,  # what is fused rounds otherwise
            close=pipeline.close,
        )

    return build
