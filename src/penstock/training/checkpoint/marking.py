"""Checkpoints of a stream that goes on: each stage's state is copied when the stage comes to it.

Stages come to the end of a minibatch at different times. What a stage holds then is what it would
hold if the stream ended there: its updates depend on no later microbatch, and neither do its
buffers before it has run a later forward. So pieces that are copied at different times make one
checkpoint, as in PipeDream (SOSP 2019, section 4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from penstock.training.checkpoint.taking import StageState, TrainedStage


class StreamMark:
    """Copies the stages of this process, and writes them once all have been.

    Args:
        stages: those that this process writes, by number; of others nothing is wanted.
        state_of: gives a stage's state as it is.
        write: takes the states of all of them, by number.
    """

    def __init__(
        self,
        stages: Mapping[int, TrainedStage],
        state_of: Callable[[TrainedStage], StageState],
        write: Callable[[Mapping[int, StageState]], None],
    ) -> None:
        self._stages = stages
        self._state_of = state_of
        self._write = write
        self._lock = threading.Lock()
        self._ready: dict[int, StageState] = {}
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._rest: dict[int, StageState] = {}

    def forwards_done(self, stage: int) -> None:
        """Copy the buffers of a stage."""
        if stage in self._stages:
            state = self._stages[stage].stage.state_dict()
            self._buffers[stage] = _copied({name: state[name] for name in self._names(stage)})
            self._complete(stage)

    def updated(self, stage: int) -> None:
        """Copy the weights of a stage, and what its optimizer keeps."""
        if stage in self._stages:
            buffers, state = self._names(stage), self._state_of(self._stages[stage])
            rest = {name: value for name, value in state.tensors.items() if name not in buffers}
            self._rest[stage] = state._replace(tensors=_copied(rest))
            self._complete(stage)

    def _names(self, stage: int) -> set[str]:
        """The keys of a stage's buffers that are saved."""
        own = self._stages[stage].stage
        buffers = {
            layer.key(name) for layer in own.layers for name, _ in layer.module.named_buffers()
        }
        return buffers & own.state_dict().keys()

    def _complete(self, stage: int) -> None:
        if stage not in self._buffers or stage not in self._rest:
            return
        rest = self._rest.pop(stage)
        whole = rest._replace(tensors={**rest.tensors, **self._buffers.pop(stage)})
        with self._lock:  # ranks are threads
            self._ready[stage] = whole
            is_last = len(self._ready) == len(self._stages)
        if is_last:
            self._write(self._ready)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In main memory. Not in memory that lasts, as for checkpoints one at a time: those before may
    still be written."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
