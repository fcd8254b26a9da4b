"""A worker: the stages of one rank, and one function per kind of op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.run.interpreter import Record, perform_all
from penstock.schedule import Kind, Op, Schedule
from penstock.stage import Criterion, Stage
from penstock.transport import Edge, Transport

Loss = Callable[[Any, Any], Tensor]


def _autocast_here() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }


@contextmanager
def _autocast(dtypes: Mapping[str, torch.dtype], enabled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in dtypes.items():
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


@dataclass(frozen=True)
class Minibatch:
    """One minibatch, cut into microbatches.

    Attributes:
        step: its number, for random streams.
        inputs: one value per microbatch.
        targets: one per microbatch, or empty when only outputs are wanted.
        weights: the factor on each microbatch's loss.
        autocast: device types and dtypes for which the thread that made this had autocast on.
    """

    step: int
    inputs: Sequence[Any]
    targets: Sequence[Any] = ()
    weights: Sequence[float] = ()
    autocast: Mapping[str, torch.dtype] = field(default_factory=_autocast_here)


@dataclass
class Harvest:
    """What a rank has after its ops.

    Attributes:
        records: when each op ran.
        losses: of the microbatches whose last stage this rank ran, unweighted.
        outputs: likewise, when there are no targets.
    """

    records: list[Record] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@contextmanager
def _modes(minibatch: Minibatch) -> Iterator[None]:
    """What holds in any thread: gradients if there are targets; no autocast beside the forward."""
    training = bool(minibatch.targets)
    inference = torch.inference_mode(False) if training else nullcontext()
    with inference, torch.set_grad_enabled(training), _autocast(_autocast_here(), enabled=False):
        yield


_NOTHING = (Schedule(()), Minibatch(0, ()), Harvest())


class Worker:
    """Performs the ops of one rank.

    Args:
        rank: which.
        stages: the stages it holds, by number.
        num_stages: of the whole model.
        transport: its end of the channels to other ranks.
        loss: from (output, targets) of a microbatch to a scalar, or ``None`` if never trained.
        optimizers: by stage; a stage without one only accumulates gradients.

    Attributes:
        num_updates: optimizer steps begun so far, over all its stages.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        num_stages: int,
        transport: Transport,
        loss: Loss | None,
        optimizers: Mapping[int, torch.optim.Optimizer],
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self._last_stage = num_stages - 1
        self.num_updates = 0
        self._loss = loss
        self._optimizers = optimizers
        self._values: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self._schedule, self._minibatch, self._harvest = _NOTHING
        self._perform: dict[Kind, Callable[[Op], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._recv_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._recv_backward,
            Kind.UPDATE: self._update,
        }

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of op it can perform."""
        return frozenset(self._perform)

    def run(self, schedule: Schedule, minibatch: Minibatch) -> Harvest:
        """Perform this rank's ops of a lowered schedule on one minibatch.

        With targets, gradients are computed and accumulate in ``.grad``; without, none are.

        Raises:
            RunError: an op failed; telling the peers is the driver's part.
        """
        self._schedule, self._minibatch = schedule, minibatch
        self._harvest = harvest = Harvest()
        try:
            with _modes(minibatch):
                harvest.records = perform_all(schedule.ranks[self.rank], self)
            self.transport.flush()
        except BaseException:
            # What was accumulated must not leak into the next minibatch's gradients.
            for optimizer in self._optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            raise
        finally:
            self.forget()
        return harvest

    def forget(self) -> None:
        """Drop everything of the current minibatch, finished or not."""
        for stage in self.stages.values():
            stage.forget()
        self._values.clear()
        self._gradients.clear()
        self._schedule, self._minibatch, self._harvest = _NOTHING

    def outgoing(self, schedule: Schedule) -> set[Edge]:
        """The edges on which others wait for this rank."""
        sends = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        return {self._edge(op, schedule) for op in schedule.ranks[self.rank] if op.kind in sends}

    def perform(self, op: Op) -> None:
        """Do what ``op`` says."""
        self._perform[op.kind](op)

    def _forward(self, op: Op) -> None:
        stage, _, microbatch, _ = op
        minibatch = self._minibatch
        key = (stage, microbatch)
        value = minibatch.inputs[microbatch] if stage == 0 else self._values.pop(key)
        with _autocast(minibatch.autocast, enabled=True):
            result = self.stages[stage].forward(
                microbatch, value, minibatch.step, self._criterion(stage, microbatch)
            )
        if stage < self._last_stage:
            self._values[stage + 1, microbatch] = result
        elif minibatch.targets:
            self._harvest.losses[microbatch] = result
        else:
            self._harvest.outputs[microbatch] = result

    def _criterion(self, stage: int, microbatch: int) -> Criterion | None:
        if stage < self._last_stage or not self._minibatch.targets or self._loss is None:
            return None
        return partial(_loss_of, self._loss, self._minibatch.targets[microbatch])

    def _backward(self, op: Op) -> None:
        stage, _, microbatch, _ = op
        if stage == self._last_stage:
            # d(sum of weighted losses) / d(this loss) is the weight.
            weight = self._minibatch.weights[microbatch]
            gradients: list[Tensor | None] = [
                torch.full_like(self._harvest.losses[microbatch], weight) if weight else None
            ]
        else:
            gradients = self._gradients.pop((stage, microbatch))
        result = self.stages[stage].backward(microbatch, gradients)
        if stage > 0:
            self._gradients[stage - 1, microbatch] = result

    def _send_forward(self, op: Op) -> None:
        value = self._values.pop((op.stage + 1, op.microbatch))
        self.transport.send(self._edge(op, self._schedule), op.microbatch, value)

    def _send_backward(self, op: Op) -> None:
        gradients = self._gradients.pop((op.stage - 1, op.microbatch))
        self.transport.send(self._edge(op, self._schedule), op.microbatch, gradients)

    def _recv_forward(self, op: Op) -> None:
        self._values[op.stage, op.microbatch] = self._receive(op)

    def _recv_backward(self, op: Op) -> None:
        self._gradients[op.stage, op.microbatch] = self._receive(op)

    def _receive(self, op: Op) -> Any:
        needed = self._schedule.dependencies(op)[0]
        edge = self._edge(needed, self._schedule)
        waiting = f"rank {self.rank}, waiting at {op} for {needed} of rank {edge.source}"
        return self.transport.recv(edge, op.microbatch, waiting)

    def _edge(self, send: Op, schedule: Schedule) -> Edge:
        """The edge on which a send op sends: forward and backward messages have tags of their own,
        since they may be awaited in any order."""
        forward = send.kind is Kind.SEND_FORWARD
        kind, neighbour = (
            (Kind.RECV_FORWARD, send.stage + 1) if forward else (Kind.RECV_BACKWARD, send.stage - 1)
        )
        target = schedule.where[Op(neighbour, kind, send.microbatch)]
        return Edge(schedule.where[send], target, 2 * send.stage + (not forward))

    def _update(self, op: Op) -> None:
        optimizer = self._optimizers.get(op.stage)
        if optimizer is not None:
            self.num_updates += 1
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _loss_of(loss: Loss, targets: Any, outputs: Any) -> Tensor:
    return loss(outputs, targets)
