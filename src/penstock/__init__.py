"""Penstock: profile, plan, check, simulate, run and draw pipeline-parallel training.

Planning and simulating never import torch; the names that need it (``Pipeline``, ``profile``) are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock import errors, versions
from penstock.cluster import Cluster, Device, Link
from penstock.drawing import draw
from penstock.graph import Layer, LayerGraph
from penstock.planner import plan
from penstock.plans import Plan
from penstock.schedule import Kind, Op, Schedule
from penstock.schedule import families as schedules
from penstock.schedule.check import check
from penstock.schedule.memory import Sizes
from penstock.timing.costs import Costs
from penstock.timing.simulator import simulate
from penstock.timing.spans import Span
from penstock.timing.timeline import Timeline

if TYPE_CHECKING:
    from penstock import optimizers
    from penstock.model.microbatches import Microbatches
    from penstock.model.spine import run_spine
    from penstock.pipeline import Pipeline
    from penstock.profiler import profile
    from penstock.rehearsal import rehearse
    from penstock.tracing import Captured, capture

__version__ = "0.1.0"
__all__ = [
    "Captured",
    "Cluster",
    "Costs",
    "Device",
    "Kind",
    "Layer",
    "LayerGraph",
    "Link",
    "Microbatches",
    "Op",
    "Pipeline",
    "Plan",
    "Schedule",
    "Sizes",
    "Span",
    "Timeline",
    "capture",
    "check",
    "draw",
    "errors",
    "optimizers",
    "plan",
    "profile",
    "rehearse",
    "run_spine",
    "schedules",
    "simulate",
    "versions",
]

_NEEDS_TORCH = {
    "Captured": "penstock.tracing",
    "capture": "penstock.tracing",
    "Microbatches": "penstock.model.microbatches",
    "Pipeline": "penstock.pipeline",
    "profile": "penstock.profiler",
    "rehearse": "penstock.rehearsal",
    "run_spine": "penstock.model.spine",
}


def __getattr__(name: str) -> Any:
    if name == "optimizers":
        return importlib.import_module("penstock.optimizers")
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
