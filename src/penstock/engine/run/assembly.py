"""A pipeline that is ready to run, as a value: what runs it, and the state of its stages here.

``building`` puts it together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import expect, flag, one_of, whole
from penstock.engine.device.accelerators import Devices
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.cutter import Cutter
from penstock.engine.run.drive.driver import Deadlines, Driver, StageStates
from penstock.engine.run.drive.joining import TransportName
from penstock.engine.run.feed import Feed
from penstock.engine.run.given_weights import GivenWeights
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Init, Initialiser, Values
from penstock.engine.run.rank.worker import Worker
from penstock.engine.stage.backends import Backend
from penstock.engine.stage.stage import Stage
from penstock.engine.transport import Codec
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans import Plan

Results = Literal["every rank", "none"]


@dataclass(frozen=True)
class Running:
    """How to run, whatever the training is: the arguments of ``Pipeline`` with these names."""

    transport: TransportName
    seed: int
    deadlines: Deadlines
    record: bool
    results: Results
    devices: Devices | None = None
    init: Init = "given"
    message_types: Sequence[type] = ()
    compare_data: bool = True
    weights: str | os.PathLike[str] | None = None
    compile: Backend | None = None
    replay: bool = False

    def __post_init__(self) -> None:
        one_of("results", self.results, get_args(Results))
        one_of("init", self.init, get_args(Init))
        expect(self.message_types, Sequence, "message_types", "give a list of classes")
        whole("seed", self.seed, -(2**63), 2**64 - 1)
        flag("record", self.record)
        flag("replay", self.replay)
        if self.weights is not None and self.init == "per-layer":
            raise InputError(
                'init="per-layer" draws what initial_weights=… gives; leave one of them out'
            )
        Codec(self.message_types)  # refuses in threads what processes would refuse

    def values(self, model: nn.Module, layers: Sequence[NamedLayer]) -> Values:
        """Where the layers of a model have their initial values from.

        Raises:
            FileError: from files that are of another model.
            ModelError: a layer has no way to its values.
        """
        if self.weights is not None:
            return GivenWeights(model, layers, self.weights)
        return Initialiser(layers, self.seed, anew=self.init == "per-layer")

    @property
    def settings(self) -> dict[str, str]:
        """Arguments that must be alike on all ranks, as text by their names."""
        names = ("transport", "record", "results", "init", "compile", "replay")
        return {name: repr(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Assembly:
    """A pipeline that is ready to run.

    Attributes:
        plan: the one that is run: under torchrun, rank 0's.
        driver: runs the workers.
        cutter: cuts minibatches for these ranks.
        feed: gives them to the driver.
        layout: which rank holds what.
        streams: where layers draw random numbers.
        workers: this process's, in the order of their ranks.
        stages: this process's, by number; where several ranks here have copies, the first one's.
        transport: how messages travel between ranks, and why so, as a sentence.
        attempt: the name of this pipeline, which no other has, the same on all ranks.
        deadlines: how long ranks wait for each other.
        in_processes: whether other processes have ranks of it.
    """

    plan: Plan
    driver: Driver[Any]
    cutter: Cutter
    feed: Feed
    layout: Layout
    streams: LayerStreams
    workers: Sequence[Worker]
    stages: Mapping[int, Stage]
    transport: str
    attempt: str
    deadlines: Deadlines
    in_processes: bool

    def check_outside(self) -> None:
        """Raise ``InputError`` where whoever would close this is called by what it runs."""
        if any(worker.runs_in_this_thread for worker in self.workers):
            raise InputError(
                "close() was called inside a layer, the loss or the optimizer, which cannot end "
                "what calls it; call it when the step is over, or raise an error to end the step"
            )

    @property
    def in_parts(self) -> bool:
        """Whether this process has parts of its stages' layers, and nobody has the whole ones."""
        shared = any(worker.seat.size > 1 for worker in self.workers)
        return self.in_processes and (shared or self._has_rows)

    @property
    def _has_rows(self) -> bool:
        return any(stage.has_rows for stage in self.stages.values())

    def states(self) -> StageStates:
        """The state of this process's stages, under the model's keys: of a member of a group its
        parts, numbered stage × (most members of any) + coordinate."""
        most = self.plan.num_tensor_ranks
        if most == 1:
            return {index: _whole_state(stage) for index, stage in self.stages.items()}
        if not self.in_processes:  # between steps, the model has what was trained
            return {index: self.layout.own_state(index) for index in self.stages}
        (worker,) = self.workers
        return {
            most * index + worker.seat.coordinate: stage.state_dict()
            for index, stage in self.stages.items()
        }

    def joined(self, states: StageStates) -> StageStates:
        """By stage, what all members of its group have of it; ``states`` of all are here."""
        most, sharings = self.plan.num_tensor_ranks, self.layout.sharings
        if sharings is None or not self.in_processes or not states:
            return states
        return {
            stage: sharings.joined(
                [states[most * stage + index] for index in range(planned.tensor_ranks)]
            )
            for stage, planned in enumerate(self.plan.stages)
        }

    def meet(self, purpose: str) -> Rendezvous | None:
        """A meeting of all processes, which must all come; ``None`` if there is only this one.

        Args:
            purpose: what they do together, for example ``"loading a checkpoint"``.
        """
        if not self.in_processes:
            return None
        return Rendezvous.of_group(purpose, self.deadlines.step.seconds, "raise deadline_seconds")


def _whole_state(stage: Stage) -> dict[str, Any]:
    """The state of a stage; if copies have rows of it, all of them ask for it together."""
    state = stage.state_dict()
    for kept in (stage.sharded, stage.experts):
        if kept is not None:
            state |= kept.whole_state()
    return state


def copied_states(parts: Assembly) -> dict[int, dict[str, Any]]:
    """The state of each stage, copied to main memory, with all updates made; nothing may run
    meanwhile."""
    states: dict[int, dict[str, Any]] = {}
    if parts.plan.spill is None:
        return copied(parts.states())
    for worker in parts.workers:
        worker.apply_deferred()
        for index in worker.stages:
            with worker.visiting(index):
                # Nothing may see a stage when it leaves; the next may come to the same place.
                states |= copied({index: parts.stages[index].state_dict()})
    return dict(sorted(states.items()))


def copied(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of stages, copied to main memory; what is tied stays so."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return {k: dict(tree.replace(Tensor, copy_of, state)) for k, state in states.items()}


def by_key(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The states of stages as that of the model."""
    return {key: value for _, state in sorted(states.items()) for key, value in state.items()}
