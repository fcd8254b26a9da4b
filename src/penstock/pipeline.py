"""``Pipeline``: the five lines that a training script changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import microbatches
from penstock.allocator import keep_freed_pages
from penstock.errors import InputError, PlanError
from penstock.microbatches import Weight
from penstock.planner import Plan
from penstock.planner.runnable import obstacle
from penstock.profiler import OptimizerFactory
from penstock.randomness import LayerStreams
from penstock.run.driver import Driver
from penstock.run.outcome import Outcome
from penstock.run.processes import ProcessDriver, agree
from penstock.run.threads import ThreadDriver
from penstock.run.worker import Loss, Minibatch, Worker
from penstock.schedule import Schedule
from penstock.schedule.lower import add_communication, add_update, forward_only
from penstock.spine import NamedLayer, evaluation_mode, spine_fingerprint, spine_of
from penstock.stage import Stage
from penstock.timeline import Timeline
from penstock.transport import ProcessGroupTransport, ThreadExchange, Transport
from penstock.values import expect

_EXAMPLES = {
    "loss": "loss=torch.nn.functional.cross_entropy",
    "optimizer": "optimizer=lambda parameters: torch.optim.AdamW(parameters)",
    "weight": "weight=lambda targets: (targets != -100).sum()",
}
TransportName = Literal["auto", "threads", "process-group"]


class Pipeline:
    """Trains a model as a plan says, with the results of one device.

    Under plain ``python`` every stage runs in a thread of this process; under ``torchrun`` each
    process runs one rank, and every process must make the same calls. The model's own parameters
    are trained in place (under ``torchrun``, those of this rank's stages). Under ``torchrun`` the
    plan and the seed of rank 0 count, so every process may profile and plan for itself.

    Args:
        model: an ``nn.Sequential``, or a module with a ``spine`` (see ``penstock.spine``).
        plan: made for this model; its layers are checked against it.
        loss: from (output, targets) of one microbatch to a scalar tensor. Needed by ``step``.
        optimizer: makes an optimizer of the parameters it is given, once per stage. Without one,
            ``step`` only accumulates gradients in ``.grad``.
        transport: ``"threads"``, ``"process-group"``, or ``"auto"``: processes if the job has
            several, else threads.
        seed: of dropout and other random layers; by default torch's initial seed. Draws depend on
            the seed, the step, the microbatch and the layer, on nothing else.
        reduction: ``"mean"`` if the loss is a mean over its rows, ``"sum"`` if it is a sum.
        weight: for a mean over something else than rows (say, tokens that are not padding): how
            many terms the targets of one microbatch contribute.
        deadline_seconds: how long an op may wait for another rank.
        record: gather the timeline on every rank under ``torchrun``; threads always record.

    Raises:
        ModelError: the model cannot be cut, or the plan is for another one.
        InputError: contradictory arguments, or a number of processes that the plan does not have.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything meets
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        transport: TransportName = "auto",
        seed: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        weight: Weight | None = None,
        deadline_seconds: float = 300.0,
        record: bool = True,
    ) -> None:
        _check_options(transport, reduction, weight, deadline_seconds)
        expect(plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
        for name, function in (("loss", loss), ("optimizer", optimizer), ("weight", weight)):
            if function is not None:
                expect(function, Callable, name, f"give a function, as in {_EXAMPLES[name]}")
        keep_freed_pages()
        layers = spine_of(model)
        plan.check_model([layer.name for layer in layers], spine_fingerprint(layers))
        reason = obstacle(plan.build_schedule())
        if reason:
            raise PlanError(
                f"the runtime cannot perform {plan.schedule} yet: {reason}; it can be simulated "
                "and drawn"
            )
        self.plan = plan
        self._model = model
        self._loss = loss
        self._reduction = reduction
        self._weight = weight
        self._step = 0
        self._timeline: Timeline | None = None
        self._closed = False
        self._lowered = lru_cache(maxsize=32)(self._lower)
        self._owns_group = False
        self._running = threading.Lock()
        seed = torch.initial_seed() if seed is None else seed
        if transport == "process-group" or (transport == "auto" and _several_processes()):
            self._driver, self.stages = self._start_processes(
                layers, seed, deadline_seconds, optimizer, record
            )
        else:
            self._driver, self.stages = self._start_threads(
                layers, seed, deadline_seconds, optimizer
            )

    def _start_threads(
        self,
        layers: tuple[NamedLayer, ...],
        seed: int,
        deadline_seconds: float,
        optimizer: OptimizerFactory | None,
    ) -> tuple[Driver, dict[int, Stage]]:
        self._streams = LayerStreams(seed)
        stages = _build_stages(self.plan, layers, self._streams)
        exchange = ThreadExchange(self.plan.num_ranks, deadline_seconds)
        workers = [
            self._worker(rank, _of_rank(stages, self.plan, rank), transport, optimizer)
            for rank, transport in enumerate(exchange.transports)
        ]
        return ThreadDriver(workers, self.plan.num_threads), stages

    def _start_processes(
        self,
        layers: tuple[NamedLayer, ...],
        seed: int,
        deadline_seconds: float,
        optimizer: OptimizerFactory | None,
        record: bool,
    ) -> tuple[Driver, dict[int, Stage]]:
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise InputError(
                    "transport='process-group' needs one process per rank: start the script with "
                    f"torchrun --nproc-per-node={self.plan.num_ranks}, or use transport='threads'"
                )
            dist.init_process_group("gloo")
            self._owns_group = True
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        transport = ProcessGroupTransport(num_ranks, deadline_seconds)
        self.plan, seed = agree(transport, self.plan, spine_fingerprint(layers), seed)
        if self.plan.num_ranks != num_ranks:
            raise InputError(
                f"the plan has {self.plan.num_ranks} ranks, but the job has {num_ranks} processes; "
                f"start it with torchrun --nproc-per-node={self.plan.num_ranks}, or plan with "
                f"stages={num_ranks}"
            )
        self._streams = LayerStreams(seed)
        stages = _of_rank(_build_stages(self.plan, layers, self._streams), self.plan, rank)
        worker = self._worker(rank, stages, transport, optimizer)
        torch.set_num_threads(self.plan.num_threads)
        return ProcessDriver(worker, transport, num_ranks, record), stages

    def _worker(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        optimizer: OptimizerFactory | None,
    ) -> Worker:
        parameters = {index: [*stage.parameters()] for index, stage in stages.items()}
        optimizers = {
            index: optimizer(own) for index, own in parameters.items() if optimizer and own
        }
        for built in optimizers.values():
            remedy = f"return it from the function, as in {_EXAMPLES['optimizer']}"
            expect(built, torch.optim.Optimizer, "what the optimizer function made", remedy)
        return Worker(rank, stages, len(self.plan.stages), transport, self._loss, optimizers)

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one minibatch.

        Args:
            inputs: a tensor, or tensors nested in tuples, lists or dicts; rows first. Any number of
                rows works; with fewer rows than microbatches there are fewer microbatches.
            targets: likewise, with as many rows.

        Returns:
            The loss of the minibatch, a scalar on every rank, as one device would give it.

        Raises:
            InputError: inputs and targets that do not fit together.
            StageError: a layer, the loss or the optimizer raised.
            PeerError, DeadlineError: another rank died or did not answer.

        Gradients are computed even under ``torch.no_grad``, and ``torch.autocast`` around the call
        holds for the forward and the loss. After an error in threads, the same step may be tried
        again, unless the next call says otherwise; without an optimizer, clear ``.grad`` first.
        Buffers, such as batch-norm statistics, keep what the failed step did to them.
        """
        self._check_open()
        if self._loss is None:
            raise InputError("Pipeline was built without a loss; give loss=… to train")
        rows = microbatches.num_rows(inputs, "inputs")
        if microbatches.num_rows(targets, "targets") != rows:
            raise InputError(
                f"inputs have {rows} rows, but targets have "
                f"{microbatches.num_rows(targets, 'targets')}"
            )
        count = min(self.plan.num_microbatches, rows)
        parts = microbatches.split(targets, count)
        minibatch = Minibatch(
            self._step,
            microbatches.split(inputs, count),
            parts,
            microbatches.loss_weights(parts, self._reduction, self._weight),
        )
        outcome = self._run(self._lowered(count, True), minibatch)
        self._timeline = outcome.timeline
        self._step += 1
        assert outcome.loss is not None
        return outcome.loss

    def evaluate(self, inputs: Any) -> Any:
        """Run forward only, in evaluation mode and without gradients.

        Args:
            inputs: as for ``step``, any number of rows.

        Returns:
            The model's outputs for all rows, on every rank.
        """
        self._check_open()
        count = min(self.plan.num_microbatches, microbatches.num_rows(inputs, "inputs"))
        minibatch = Minibatch(self._step, microbatches.split(inputs, count))
        layers = (layer.module for stage in self.stages.values() for layer in stage.layers)
        with evaluation_mode(self._model, *layers):
            return self._run(self._lowered(count, False), minibatch).outputs

    def _run(self, schedule: Schedule, minibatch: Minibatch) -> Outcome:
        if not self._running.acquire(blocking=False):
            raise InputError("this Pipeline is running a step in another thread; wait for it")
        try:
            random_state = torch.get_rng_state()
            outcome = self._driver.run(schedule, minibatch)
            self._streams.audit(random_state)
            return outcome
        finally:
            self._running.release()

    def _lower(self, num_microbatches: int, training: bool) -> Schedule:
        schedule = self.plan.build_schedule(num_microbatches)
        return add_communication(add_update(schedule) if training else forward_only(schedule))

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last training step.

        Raises:
            InputError: there has been no step yet, or recording is off.
        """
        if self._timeline is None:
            raise InputError("no timeline yet: run a step (and leave record=True)")
        return self._timeline

    @property
    def is_first(self) -> bool:
        """Whether this process should print and write files: rank 0, or the only process."""
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's stages, under the unsplit model's keys."""
        state: dict[str, Tensor] = {}
        for stage in self.stages.values():
            state |= stage.state_dict()
        return state

    def close(self) -> None:
        """End the workers. Leaving the ``with`` block does it."""
        if not self._closed:
            self._closed = True
            self._driver.close()
            if self._owns_group:
                dist.destroy_process_group()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this Pipeline is closed; build a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_options(
    transport: str, reduction: str, weight: Weight | None, deadline_seconds: float
) -> None:
    if transport not in ("auto", "threads", "process-group"):
        raise InputError(f"transport is {transport!r}; use auto, threads or process-group")
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is {reduction!r}; use mean or sum")
    if weight is not None and reduction == "sum":
        raise InputError("weight is for reduction='mean'; a sum needs none")
    if not 0 < deadline_seconds <= threading.TIMEOUT_MAX:
        raise InputError(
            f"deadline_seconds is {deadline_seconds}, but must be > 0 and not infinite: without a "
            "deadline, a rank that hangs would hang all others"
        )


def _several_processes() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _build_stages(
    plan: Plan, layers: tuple[NamedLayer, ...], streams: LayerStreams
) -> dict[int, Stage]:
    stages, first = {}, 0
    for index, planned in enumerate(plan.stages):
        own = layers[first : first + len(planned.layers)]
        stages[index] = Stage(index, own, first, streams)
        first += len(planned.layers)
    _check_untied(stages)
    return stages


def _check_untied(stages: Mapping[int, Stage]) -> None:
    holders: dict[int, int] = {}
    for index, stage in stages.items():
        for parameter in stage.parameters():
            other = holders.setdefault(id(parameter), index)
            if other != index:
                raise InputError(
                    f"stages {other} and {index} share a parameter of shape "
                    f"{tuple(parameter.shape)}; tied weights must be in one stage for now: plan "
                    "with stages=1, or save the plan, move the layers between its stages in the "
                    "file and load it, or untie them"
                )


def _of_rank(stages: Mapping[int, Stage], plan: Plan, rank: int) -> dict[int, Stage]:
    return {index: stage for index, stage in stages.items() if plan.stages[index].rank == rank}
