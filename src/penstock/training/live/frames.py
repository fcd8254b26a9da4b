"""What goes into a live stream and what comes out of it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

WhenLate = Literal["wait", "drop-oldest", "raise"]


@dataclass(frozen=True, eq=False)
class Frame:
    """What somebody has given to a stream.

    Attributes:
        number: how many were given before it, dropped ones included.
        value: what the first stage takes.
        target: what the model should give for it; ``None`` if nobody says.
        learns: whether anything may be learned from it.
        arrived_seconds: when it was given, on this process's clock.
        autocast: under which autocast it was given.
    """

    number: int
    value: Any
    target: Any
    learns: bool
    arrived_seconds: float
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)


class News(Enum):
    """What is told between results to who waits for one."""

    CHANGED = "something has gone wrong, or no more frames come"
    PAUSED = "all results so far are taken on rank 0"
    ENDED = "rank 0 has left the stream"


class Result(NamedTuple):
    """What the model gives for one frame.

    Attributes:
        frame: how many frames were given before this one, dropped ones included.
        output: the model's output, detached.
        loss: that of the output, before anything was learned from the frame; ``None`` if nobody
            has said what the frame should give.
        latency_seconds: from when the frame was given until its output was there; under
            ``torchrun``, until this process knew of it.
    """

    frame: int
    output: Any
    loss: Tensor | None
    latency_seconds: float
