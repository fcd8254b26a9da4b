"""Errors that come out of layers or a loss: where they arose, with what, and what to do.

Nothing is noted while all goes well. The frames that an error came through still hold the layer
that was called and what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.base.errors import PenstockError, StageError
from penstock.core.schedule import Op
from penstock.engine.model import tree
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.layer_runs import DirectCalls
from penstock.engine.stage.microbatch_graph import NotFinite
from penstock.engine.stage.protocol import LossOfTargets, RunnableStage
from penstock.engine.tracing.lines import causes_of, lines_of

_CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})
"""Functions of torch by which every module is called."""

_LIKE_THOSE = "give inputs like those that were profiled, or profile and plan with such as these"
_TARGETS = "see whether outputs and targets are what this loss takes, as in loss(model(x), targets)"
_MEMORY = "take smaller microbatches (more of them), or plan with memory_bytes=… or recompute="
_ALONE = "model(inputs) without a pipeline raises the same, and a debugger stops there"


@dataclass(frozen=True)
class FailureContext:
    """What is known about a rank when one of its ops fails.

    Attributes:
        rank: its number; ``None`` where nobody says.
        stages: those that it has, by number.
        shapes: by layer, what it was profiled with.
        frames: of a live stream, the number that the caller knows each microbatch by.
    """

    rank: int | None = None
    stages: Mapping[int, RunnableStage] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    frames: Mapping[int, int] = field(default_factory=dict)


class _CallSite(NamedTuple):
    """What was called when an error arose.

    Attributes:
        name: in words.
        given: the shapes of what it was given.
        profiled: of what it was profiled with; empty where nobody says.
        is_loss: whether it is the loss, and not a layer.
    """

    name: str
    given: str
    profiled: str = ""
    is_loss: bool = False

    def __str__(self) -> str:
        given = f", given {self.given}" * bool(self.given)
        differs = self.profiled and self.profiled != self.given
        return f"in {self.name}{given}" + f"; it was profiled with {self.profiled}" * bool(differs)


def stage_error(op: Op, error: Exception, context: FailureContext) -> StageError:
    """An error of the user's code, with where it arose, and what to do.

    Args:
        op: what failed.
        error: becomes the cause.
        context: of the rank that failed.
    """
    # A backward may go through another microbatch than the one that its gradient comes from.
    about = error.microbatch if isinstance(error, NotFinite) else op.microbatch
    frame = f"frame {context.frames[about]}, " if about in context.frames else ""
    rank = "" if context.rank is None else f"rank {context.rank}, "
    where = f"{rank}stage {op.stage}, {frame}microbatch {about}, op {op}"
    called = _called(error, context.stages.get(op.stage), context.shapes)
    details = "".join(f"\n  {line}" for line in _details(error, called))
    named = StageError(f"{where}: {type(error).__name__}: {error}{details}")
    named.__cause__ = error
    return named


def _details(error: Exception, called: _CallSite | None) -> Iterator[str]:
    if called is not None:
        yield str(called)
    lines = lines_of(error)
    if lines:
        yield f"at {lines[-1]}"
    remedy = _remedy(error, called)
    if remedy:
        yield f"what to do: {remedy}"


def _remedy(error: Exception, called: _CallSite | None) -> str:
    if isinstance(error, PenstockError | ArithmeticError):
        return ""  # they say it themselves
    if isinstance(error, torch.OutOfMemoryError):
        return _MEMORY
    if called is None:
        return ""
    if called.is_loss:
        return _TARGETS
    alike = not called.profiled or _but_rows(called.profiled) == _but_rows(called.given)
    return _ALONE if alike else _LIKE_THOSE


def _but_rows(shapes: str) -> list[str]:
    """Shapes without their first dimension, which may differ."""
    return [shape.partition(",")[2] for shape in shapes.split("(")[1:]]


def _called(
    error: Exception, stage: RunnableStage | None, profiled: Mapping[str, str]
) -> _CallSite | None:
    """The layer or the loss that an error came out of; ``None`` if it was neither, as in a
    backward."""
    # An emulated stage has no layers.
    layers = {id(layer.module): layer for layer in getattr(stage, "layers", ())}
    for cause in causes_of(error):
        sites = [_of_frame(frame, layers, profiled) for frame in _frames(cause)]
        innermost = next((site for site in reversed(sites) if site is not None), None)
        if innermost is not None:
            return innermost
    return None


def _of_frame(
    frame: FrameType, layers: Mapping[int, NamedLayer], profiled: Mapping[str, str]
) -> _CallSite | None:
    function, held = frame.f_code.co_name, frame.f_locals
    module = held.get("self")
    if isinstance(module, LossOfTargets) and "outputs" in held:
        outputs, targets = tree.shapes(held["outputs"]), tree.shapes(module.targets)
        name = "the loss" if module.look is None else "the loss or a metric"
        return _CallSite(name, f"outputs {outputs} and targets {targets}", is_loss=True)
    inputs: Any = held.get("args", ()), held.get("kwargs", {})
    if isinstance(module, DirectCalls) and "_layer" in held:
        module, inputs = held["_layer"], held["value"]
    elif function not in _CALLS:
        return None
    layer = layers.get(id(module))
    if layer is None or not isinstance(module, nn.Module):
        return None
    name = f"layer {layer.name!r} ({getattr(module, 'kind', type(module).__name__)})"
    return _CallSite(name, tree.shapes(inputs), profiled.get(layer.name, ""))


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
