"""A pipeline that has been built: one thing at a time runs in it, and it tells of its last step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import whole
from penstock.core.summation.staleness import StaleStream
from penstock.core.timing.timeline import Timeline
from penstock.engine.device.accelerators import HOST
from penstock.engine.model.spine import spine_of
from penstock.engine.run.assembly import Results
from penstock.engine.run.building import Built, RemoteStages
from penstock.engine.run.drive.driver import told
from penstock.engine.run.handles import OwnRows, Rows, StageOptimizers, StageSchedulers, own_rows
from penstock.engine.run.history import History, Work
from penstock.engine.run.outcome import Peak, memory_of_ranks
from penstock.engine.run.recipe import LossScale
from penstock.engine.weights.store import HeldVersions
from penstock.training.checkpoint.keeper import Keeper
from penstock.training.pipeline.habits import SilentTraining, nothing_like


class RunningPipeline:
    """A plan that runs: what belongs to training, evaluating and saving alike.

    Args:
        built: the pipeline, put together.
        grad_scaler: the user's.
        results: whether ranks tell each other losses, metrics and outputs.
    """

    def __init__(
        self, built: Built, grad_scaler: torch.amp.GradScaler | None, results: Results
    ) -> None:
        self._model, self._parts, self._recipe, self._outside = built
        self.plan = self._parts.plan
        self.stages = self._parts.stages
        self.transport = self._parts.transport
        self._grad_scaler = grad_scaler
        self._results = results
        self._step = 0
        self._accumulates = False
        self._history = History(self.plan.schedule, self.plan.versions.activations)
        self._closed = False
        # Nearly no model has it, and torch takes long to say of a module what it has not.
        self._check_captured = getattr(self._model, "check_as_captured", None)
        self._running = threading.Lock()
        self._keeper = Keeper(self._parts, grad_scaler)
        own = self.stages.values() if self.is_first and not self.trains else ()
        self._silence = SilentTraining(
            self._model, [p for stage in own for p in stage.parameters()]
        )
        self._elsewhere = RemoteStages.watching(
            self._model, self.stages, len(self.plan.stages), in_parts=self._parts.in_parts
        )

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> object:
            public = [known for known in dir(type(self)) if not known.startswith("_")]
            raise nothing_like(name, public)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """A pipeline is no module.

        Raises:
            InputError: always; it says what to call instead.
        """
        raise nothing_like("__call__")

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this Pipeline is closed; build a new one")

    def _check_as_captured(self) -> None:
        """See that a captured model has the attributes that are in its graphs."""
        if self._check_captured is not None:
            self._check_captured()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Nothing else may run meanwhile; afterwards, everything is settled."""
        self._check_open()
        if not self._running.acquire(blocking=False):
            raise _busy()
        updaters = [worker.updater for worker in self._parts.workers]
        try:
            self._keeper.check()
            self._outside.check()
            self._check_as_captured()
            self._parts.layout.follow()
            if self._grad_scaler is not None:  # its state may have been loaded meanwhile
                for updater in updaters:
                    updater.loss_scale = LossScale.of(self._grad_scaler)
            yield
        finally:
            scale = updaters[0].loss_scale
            if scale is not None and self._grad_scaler is not None:
                scale.store(self._grad_scaler)
            self._parts.layout.let_go()
            self._running.release()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Nothing else may run meanwhile, and all updates have been made."""
        with self._exclusively():
            for worker in self._parts.workers:
                worker.apply_deferred()  # updates that are late
            yield

    def _come_to_rest(self) -> None:
        """Return when the options of optimizers may be read and set."""
        if self.plan.spill is not None:
            with self._settled():
                return
        self._check_open()
        if self._running.locked():
            raise _busy()

    @property
    def trains(self) -> bool:
        """Whether steps update weights: there is an optimizer. Without, they only add gradients up
        in ``.grad``."""
        return self._recipe.optimizer is not None

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last training step; without a flush, of the last loop over
        ``steps`` (its last 256 minibatches), with the weight versions that passes read.

        Raises:
            InputError: there has been no step yet, or recording is off.
        """
        return self._history.timeline

    @property
    def held_versions(self) -> tuple[HeldVersions, ...]:
        """The most versions of its stage's weights that each rank held at once during the last loop
        over ``steps``, and their bytes.

        Raises:
            InputError: there has been no step yet, or the plan flushes, so that there is only one.
        """
        return self._history.held_versions

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last training step, weighted like its loss; empty if the pipeline has
        none or tells no results."""
        return self._history.metrics if self._results == "every rank" else {}

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The most that each rank held for backwards during the last training step, in bytes of
        activations and in microbatches; beside ``Timeline.peak_bytes(plan.sizes)``.

        Raises:
            InputError: there has been no step yet, or memory is not counted.
        """
        return self._history.peaks

    @property
    def work(self) -> Work:
        """Rows, tokens and floating-point operations of the last training step, those of all
        processes. Operations are counted when this is first asked for, once, on one microbatch.

        Raises:
            InputError: there has been no step yet.
        """
        return self._history.work.last(lambda: [layer.module for layer in spine_of(self._model)])

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """The memory that each rank has needed at most: of one that computes on an accelerator of
        this process what torch has allocated there so far, for all of its ranks; of any other what
        its stages hold (weights, gradients, optimizer state, as the plan has them), and the most
        activations of the last training step, as counted for ``peaks``, or else by the order of its
        ops and the sizes in the profile. Where stages come and go, what the plan says.

        Raises:
            InputError: there has been no step yet, or recording is off and memory is not counted.
        """
        activations = self._history.activation_bytes(self.plan.sizes)
        return memory_of_ranks(self.plan, activations, self.devices)

    @property
    def devices(self) -> dict[int, torch.device]:
        """Where the ranks of this process compute, by their numbers."""
        return {
            worker.rank: HOST if worker.queue is None else worker.queue.device
            for worker in self._parts.workers
        }

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last training step, before clipping; in a loop over
        ``steps`` with ``post_validate``, of the step before.

        Raises:
            InputError: there has been no step yet, or neither clip_norm nor a grad_scaler asks for
                it.
        """
        return self._history.grad_norm

    @property
    def stale_streams(self) -> dict[int, StaleStream]:
        """The gradients that made the updates of a parameter server in the last training step, or
        the last loop over ``steps`` that has ended: by stage, of the stages with copies that this
        process has. Empty unless the plan's ``summing.stale`` allows for late gradients."""
        return {
            stage: reducer.stream
            for worker in self._parts.workers
            for reducer in worker.updater.sums.stale
            for stage in reducer.stages
        }

    @property
    def optimizers(self) -> StageOptimizers:
        """The optimizers of this process's stages as one, to read and set learning rates; see
        ``StageOptimizers``. Without ``optimizer`` it has no groups."""
        return StageOptimizers(self._parts.workers, self._come_to_rest)

    @property
    def schedulers(self) -> StageSchedulers:
        """The learning-rate schedulers of this process's stages as one; see ``StageSchedulers``."""
        meet = partial(self._parts.meet, "stepping schedulers")
        return StageSchedulers(self._parts.workers, self._settled, meet)

    def dump(self) -> str:
        """The last and the present op of each rank of this process, one line per rank; may be
        called from any thread, such as a watchdog's, while a step is running."""
        return "\n".join(worker.dump() for worker in self._parts.workers)

    @property
    def num_steps(self) -> int:
        """How many minibatches have been trained on, those before a loaded checkpoint included; in
        a loop over ``steps``, as far as their losses have been given.

        It is the number of the next minibatch in the run, too, from which random layers draw:
        whoever counts minibatches elsewhere, and resumes there, may set it between steps.
        """
        return self._step

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        whole("num_steps", number, 0)
        with self._exclusively():
            self._step = number

    def any_process(self, wish: bool) -> bool:
        """Whether any process wishes something: to stop, say. All must ask, between steps.

        Raises:
            PeerError, DeadlineError: another process did not.
        """
        self._check_open()
        meeting = self._parts.meet("deciding together")
        if meeting is None:
            return wish
        return any(meeting.exchange(wish, bool, "to decide together"))

    @property
    def is_first(self) -> bool:
        """Whether this process should print and write files: rank 0, or the only process."""
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    def own_rows(self, rows: Rows) -> OwnRows:
        """A data set of which this process loads only rows that its stages compute with, where all
        processes ask for the same minibatches. Others hold a copy of a row that was loaded.

        It is for a ``DataLoader`` that makes minibatches of rows (``batch_size=…``, or a batch
        sampler), shuffled alike on all processes, and needs ``compare_data=False``. In one process,
        and without a flush, all rows are loaded.

        Args:
            rows: a data set with ``__getitem__`` and ``__len__``.

        Raises:
            InputError: rows have no numbers, processes compare their data, or ``weight`` counts the
                targets of all rows.
        """
        return own_rows(self._parts, self._recipe, rows)

    def close(self) -> None:
        """End the workers, and wait until the last checkpoint is written. Leaving the ``with``
        block does it.

        Raises:
            FileError: that checkpoint could not be written.
            InputError: a layer calls it.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close, maybe while an error is on its way, which learns what went wrong."""
        self._parts.check_outside()
        try:
            if not self._closed:
                self._closed = True
                why = "" if error is None else f"{type(error).__name__}: {told(error)}"
                self._parts.driver.close(why)
        finally:
            try:
                self._keeper.close(error)
            finally:  # a checkpoint may have been read from tiers up to now
                for worker in self._parts.workers:
                    worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)


def _busy() -> InputError:
    return InputError(
        "this Pipeline is running already, in another thread or a loop over steps(); wait for it, "
        "or leave the loop"
    )
