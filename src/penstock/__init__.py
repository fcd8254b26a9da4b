"""Penstock: profile, plan, check, simulate, run and draw pipeline-parallel training.

Every name is loaded when it is first used: ``import penstock`` loads next to nothing, and only the
names that need torch (``Pipeline``, ``profile``, ``capture``, ``rehearse`` …) wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import ModulesByPublicName, loaded_when_used, provide

if TYPE_CHECKING:
    from penstock.base import errors
    from penstock.base.errors import (
        ArgumentError,
        DeadlineError,
        FileError,
        InputError,
        ModelError,
        NameMissing,
        PeerError,
        PenstockError,
        PlanError,
        RunError,
        ScheduleError,
        StageError,
    )
    from penstock.core import versions
    from penstock.core.cluster import Card, Cluster, Device, Group, Link, SpareMachine, Tier, Wire
    from penstock.core.graph import Estimate, Layer, LayerGraph
    from penstock.core.schedule import Kind, Op, Schedule
    from penstock.core.schedule import families as schedules
    from penstock.core.schedule.check import check
    from penstock.core.schedule.memory import Sizes
    from penstock.core.timing.costs import Costs
    from penstock.core.timing.simulator import simulate
    from penstock.core.timing.spans import Span
    from penstock.core.timing.timeline import Timeline
    from penstock.drawing import Comparison, compare, draw
    from penstock.engine import optimizers
    from penstock.engine.model.batches import model_loss
    from penstock.engine.model.microbatches import Microbatches
    from penstock.engine.model.spine import run_spine
    from penstock.engine.tracing import Captured, capture
    from penstock.planning.planner import plan, replan
    from penstock.planning.plans import Plan
    from penstock.planning.turns import stop
    from penstock.training.checkpoint.saving import Checkpoints
    from penstock.training.estimating import estimate
    from penstock.training.fitting.callbacks import Callback, EarlyStopping
    from penstock.training.fitting.loop import fit
    from penstock.training.fitting.watching import Watch
    from penstock.training.fleet import Fleet, Job
    from penstock.training.live.opening import stream
    from penstock.training.pipeline import Pipeline
    from penstock.training.profiler import profile
    from penstock.training.rehearsal import rehearse

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "Callback",
    "Captured",
    "Card",
    "Checkpoints",
    "Cluster",
    "Comparison",
    "Costs",
    "DeadlineError",
    "Device",
    "EarlyStopping",
    "Estimate",
    "FileError",
    "Fleet",
    "Group",
    "InputError",
    "Job",
    "Kind",
    "Layer",
    "LayerGraph",
    "Link",
    "Microbatches",
    "ModelError",
    "NameMissing",
    "Op",
    "PeerError",
    "PenstockError",
    "Pipeline",
    "Plan",
    "PlanError",
    "RunError",
    "Schedule",
    "ScheduleError",
    "Sizes",
    "Span",
    "SpareMachine",
    "StageError",
    "Tier",
    "Timeline",
    "Watch",
    "Wire",
    "capture",
    "check",
    "compare",
    "draw",
    "errors",
    "estimate",
    "fit",
    "model_loss",
    "optimizers",
    "plan",
    "profile",
    "rehearse",
    "replan",
    "run_spine",
    "schedules",
    "simulate",
    "stop",
    "stream",
    "versions",
]

_MODULES = {
    "errors": "penstock.base.errors",
    "optimizers": "penstock.engine.optimizers",
    "schedules": "penstock.core.schedule.families",
    "stop": "penstock.planning.turns.stop",
    "versions": "penstock.core.versions",
}
"""Modules that are public as they are: ``pk.versions``, ``from penstock.versions import Stash``."""

_CELLS = "penstock.drawing.cells"
provide(
    {
        "adopted": "penstock.planning.planner.adopting",
        "cluster_cell": _CELLS,
        "device_memories": "penstock.engine.device.memory",
        "fleet_cell": _CELLS,
        "graph_cell": _CELLS,
        "hand_over": "penstock.planning.handover.written",
        "named": "penstock.core.schedule.families",
        "schedule_cell": _CELLS,
        "timeline_cell": _CELLS,
    }
)

if not TYPE_CHECKING:  # which would take every name for one that is there
    ModulesByPublicName(__name__, _MODULES).install()
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.training.checkpoint.saving": ("Checkpoints",),
            "penstock.core.cluster": (
                "Card", "Cluster", "Device", "Group", "Link", "SpareMachine", "Tier", "Wire",
            ),
            "penstock.drawing": ("Comparison", "compare", "draw"),
            "penstock.base.errors": (
                "ArgumentError", "DeadlineError", "FileError", "InputError", "ModelError",
                "NameMissing", "PeerError", "PenstockError", "PlanError", "RunError",
                "ScheduleError", "StageError",
            ),
            "penstock.training.estimating": ("estimate",),
            "penstock.training.fitting.callbacks": ("Callback", "EarlyStopping"),
            "penstock.training.fitting.loop": ("fit",),
            "penstock.training.fitting.watching": ("Watch",),
            "penstock.training.fleet": ("Fleet", "Job"),
            "penstock.core.graph": ("Estimate", "Layer", "LayerGraph"),
            "penstock.training.live.opening": ("stream",),
            "penstock.engine.model.batches": ("model_loss",),
            "penstock.engine.model.microbatches": ("Microbatches",),
            "penstock.engine.model.spine": ("run_spine",),
            "penstock.training.pipeline": ("Pipeline",),
            "penstock.planning.planner": ("plan", "replan"),
            "penstock.planning.plans": ("Plan",),
            "penstock.training.profiler": ("profile",),
            "penstock.training.rehearsal": ("rehearse",),
            "penstock.core.schedule": ("Kind", "Op", "Schedule"),
            "penstock.core.schedule.check": ("check",),
            "penstock.core.schedule.memory": ("Sizes",),
            "penstock.core.timing.costs": ("Costs",),
            "penstock.core.timing.simulator": ("simulate",),
            "penstock.core.timing.spans": ("Span",),
            "penstock.core.timing.timeline": ("Timeline",),
            "penstock.engine.tracing": ("Captured", "capture"),
        },
        _MODULES,
    )  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
