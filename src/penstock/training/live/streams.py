"""``stream``: learn from frames as they come, on as many devices as the frame rate needs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import expect, flag, number, one_of
from penstock.core.timing.timeline import Timeline
from penstock.engine.model import tree
from penstock.engine.model.replay import autocast_here
from penstock.engine.run.assembly import by_key
from penstock.engine.run.building import Built
from penstock.engine.run.drive.driver import told
from penstock.engine.run.history import History
from penstock.planning.plans import Plan
from penstock.training.checkpoint.keeper import Keeper
from penstock.training.live.intake import (
    WAYS_TO_BE_LATE,
    LiveFrame,
    News,
    Result,
    SourceReader,
    WhenLate,
)
from penstock.training.live.loop import Engine, Loop, Results, SaveRequest
from penstock.training.live.loops import ProcessLoop, ThreadLoop
from penstock.training.live.report import Dashboard, StreamLedger, StreamReport


class Stream:
    """A model that learns from a live stream of frames, cut over the ranks of a plan; ``stream``
    makes one.

    Under plain ``python`` every rank runs in a thread of this process. Under ``torchrun`` each
    process runs one rank, and all make the same calls; frames and targets are those of rank 0,
    what other processes give is ignored, and all get the results.

    Attributes:
        plan: the one that is run.
        transport: how messages travel between ranks, and why so, as a sentence.
    """

    def __init__(self, built: Built) -> None:
        _, self._parts, self._recipe, self._outside = built
        self.plan: Plan = self._parts.plan
        self.transport: str = self._parts.transport
        policy = self.plan.versions
        self._ledger = StreamLedger(
            self.plan.place(0).warm_up if policy.activations == "newest" else 0
        )
        self._history = History(self.plan.schedule, policy.activations)
        self._keeper = Keeper(self._parts, None)
        make = ProcessLoop if self._parts.in_processes else ThreadLoop
        self._loop: Loop = make(
            Engine(self._parts, self._history, self._keeper, self._ledger.entered)
        )
        self._results = Results(self._loop, self._ledger)
        self._num_given = self._num_lost = 0
        self._numbering = threading.Lock()
        self._readers: list[SourceReader] = []
        self._has_begun = False

    def __call__(self, frame: Any, target: Any = None, *, learn: bool = True) -> Result | None:
        """Give one frame, and take the result of the frame p−1 before it, with p ranks.

        Args:
            frame: what the model takes: a tensor, or tensors nested in tuples, lists or dicts. All
                frames of a stream have the same shape.
            target: what the loss compares the output with; ``None``: nobody says, and nothing is
                learned from this frame.
            learn: whether anything is learned; otherwise it is a prediction, in evaluation mode.

        Returns:
            ``None`` for the first p−1 frames; ``rest`` has what is left in the end.

        Raises:
            StageError: a layer, the loss or the optimizer raised, or a frame is not finite
                (``stop_at_nan``). The stream is over then; results that were there can be taken.
            PeerError, DeadlineError: another rank died or did not answer.
        """
        self.put(frame, target, learn=learn)
        if self._num_under_way < self._loop.most_within:
            return None
        return self._results.next()

    def predict(self, frame: Any) -> Result | None:
        """As a call with ``learn=False``: forwards only, in the order of the other frames."""
        return self(frame, learn=False)

    def put(
        self,
        frame: Any,
        target: Any = None,
        *,
        learn: bool = True,
        when_late: WhenLate = "wait",
    ) -> bool:
        """Give one frame, and do not wait for anything; any thread may.

        Args:
            frame, target, learn: as for a call.
            when_late: what becomes of it if a frame still waits for the first stage: ``"wait"``
                behind that, ``"drop-oldest"``: take its place, or ``"raise"``.

        Returns:
            Whether no frame was dropped for it.

        Raises:
            RunError: a frame is late and ``when_late`` is ``"raise"``; else as for a call.
            InputError: the frame or the target holds no tensor, or there is no loss.
        """
        flag("learn", learn)
        return self._put(frame, target, learn, when_late, autocast_here())

    def _put(
        self,
        frame: Any,
        target: Any,
        learn: bool,
        when_late: WhenLate,
        autocast: dict[str, torch.dtype],
    ) -> bool:
        self._begin()
        self._loop.raise_failure()
        if target is not None and self._recipe.loss is None:
            raise InputError("stream was made without a loss; give loss=…, or frames alone")
        if not self._loop.follows:
            _check_tensors(frame, "the frame")
            _check_tensors(torch.empty(0) if target is None else target, "its target")
        with self._numbering:  # numbers are in the order in which frames wait
            given = LiveFrame(self._num_given, frame, target, learn, time.perf_counter(), autocast)
            kept = self._loop.put(given, when_late)
            self._num_given += 1
            self._num_lost += not kept
        return kept

    @property
    def _num_under_way(self) -> int:
        return self._num_given - self._num_lost - self._results.num_taken

    def get(self) -> Result | None:
        """The next result, in the order of the frames; ``None`` if there is none yet.

        Raises:
            RunError: as for a call.
        """
        return self._results.at_once()

    def rest(self) -> Iterator[Result]:
        """The results of all frames that are under way."""
        self._begin()
        if self._loop.follows:
            yield from self._followed()
            return
        while self._num_under_way:
            yield self._results.next()
        self._loop.pause()

    def over(
        self, source: Iterable[Any], *, rate: float | None = None, when_late: WhenLate = "wait"
    ) -> Iterator[Result]:
        """Learn from the frames of a source, and take their results as soon as they are there.

        Whoever leaves the loop early can go on with the same source in any way: the frame that is
        being read then is given to the stream, as ``when_late`` says (as with ``"wait"`` where that
        would be an error). Leaving waits for it for five seconds at most. Results that are under
        way then come first wherever results are taken next; under ``torchrun`` take ``rest()``.

        Args:
            source: gives frames, or pairs (frame, target); read in a thread of its own. Under
                ``torchrun`` only that of rank 0 is read.
            rate: frames per second at which they are given at most, for files that are to be played
                as a camera would; ``None``: as fast as the source gives them.
            when_late: what becomes of a frame that comes while another still waits for the first
                stage: ``"wait"`` (files), ``"drop-oldest"``: the one that waits is dropped
                (cameras), or ``"raise"``.

        Yields:
            The results in the order of their frames.

        Raises:
            RunError: a frame was late and ``when_late`` is ``"raise"``; else as for a call. What
                the source raises comes behind the results of the frames before.
        """
        one_of("when_late", when_late, WAYS_TO_BE_LATE)
        if rate is not None:
            number("rate", rate, positive=True)
        self._begin()
        if self._loop.follows:
            yield from self._followed()
            return
        expect(source, Iterable, "the source", "give an iterable of frames or (frame, target)")
        autocast = autocast_here()

        def give(frame: Any, target: Any) -> None:
            nobody_hears = when_late == "raise" and reader.is_left
            self._put(frame, target, True, "wait" if nobody_hears else when_late, autocast)

        self._readers = [reader for reader in self._readers if not reader.is_settled]
        same = [reader for reader in self._readers if reader.source is source]
        reader = SourceReader(
            source,
            rate=rate,
            waits=when_late == "wait",
            give=give,
            has_room=self._loop.intake.await_room,
            ended=lambda: self._loop.arrivals.put(News.CHANGED),
            before=same[-1] if same else None,
        )
        self._readers.append(reader)
        with reader, self._loop.held_back():
            yield from self._results.until(lambda: reader.is_done and not self._num_under_way)
            if self._results.closed:
                return
            reader.raise_failure()
        self._loop.pause()

    def _followed(self) -> Iterator[Result]:
        """The results up to a pause on rank 0, where none is under way then."""
        yield from self._results.followed()
        self._num_given = self._results.num_taken

    @property
    def report(self) -> StreamReport:
        """The account of the frames so far: rates, drops, latency, loss; printed, a table."""
        return self._ledger.report(self._num_given, self._loop.intake)

    def dashboard(self, every_seconds: float = 0.5) -> Dashboard:
        """The report, live in the terminal for as long as the ``with`` block lasts that it opens.

        Args:
            every_seconds: how often it is drawn anew.
        """
        number("every_seconds", every_seconds, positive=True)
        return Dashboard(lambda: self.report, self.plan, every_seconds)

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last 256 frames.

        Raises:
            InputError: no frame is through yet.
        """
        return self._history.timeline

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the parameters and buffers of this process's stages in main memory, under the
        unsplit model's keys, behind the frames that the first stage has begun.

        All updates are in them that these frames have brought. Where gradients go through their own
        frames, those of the last ones come only with further frames, or at the end. Under
        ``torchrun`` frames go on as rank 0 gives them, whatever other processes do: for states that
        belong together, let rank 0 wait (``torch.distributed.barrier``) until all have read theirs.

        Raises:
            DeadlineError: a stage is not through with them in time.
        """
        return by_key(self._loop.states())

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        position: Any = None,
    ) -> None:
        """Write a checkpoint behind the frames that the first stage has begun, while the stream
        goes on: each stage copies its state when it is through with the last of them; with
        ``partime``, the gradients that are on their way are saved, too.

        Args:
            path: the folder of the run, the same on all ranks.
            keep: how many complete checkpoints stay, the latest ones; by default all.
            position: where the caller's data are: numbers, texts or ``None``, in lists, tuples and
                dictionaries. By default how many frames the first stage has begun. Under
                ``torchrun``, path, keep and position are those of rank 0.

        Raises:
            FileError: the folder is another run's, or an earlier checkpoint could not be written;
                if that of this one fails in the background, ``close`` says so.
        """
        self._begin()
        self._keeper.check()
        self._loop.save(SaveRequest(os.fspath(path), keep, position))

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint; before the first frame. All processes must call it.

        With ``partime`` and the plan that wrote it, what follows is what would have followed there,
        to the bit, with the gradients that were on their way. With other schedules, it is what
        would have followed if the stream had ended there and begun anew.

        Args:
            path: the folder of a run, of which the latest complete checkpoint is taken, or a
                checkpoint's own.

        Returns:
            The position that ``save`` was given; ``None`` if there is no complete checkpoint.

        Raises:
            FileError: a file cannot be read, or is of another model; nothing has changed then.
            InputError: the stream has begun, or the optimizer or the scheduler is another one.
        """
        self._results.check_open()
        if self._has_begun:
            raise InputError("load before the first frame, or make a new stream and load there")
        loaded = self._keeper.load(path, weights_only=False)
        if loaded is None:
            return None
        self._loop.num_begun = loaded.step
        return loaded.position

    def _begin(self) -> None:
        self._results.check_open()
        if not self._has_begun:
            self._outside.check()
            self._parts.layout.follow()
            self._loop.start()
            self._has_begun = True

    def close(self) -> None:
        """End the stream: frames that wait for the first stage are dropped, those under way come to
        their last stage, and gradients that are still on their way then are dropped. Leaving the
        ``with`` block does it.

        Raises:
            RunError: the first failure of any rank.
            FileError: the last checkpoint could not be written.
            InputError: a layer calls it.
        """
        self._parts.check_outside()
        if self._results.closed:
            return
        self._results.closed = True
        try:
            if self._has_begun:
                self._loop.end()
        finally:
            self._results.close()  # somebody may wait for one
            self._parts.layout.let_go()
            self._parts.driver.close()
            self._keeper.close()

    @property
    def num_gradients_dropped(self) -> int:
        """Gradients that have found nothing to go through in this process: those behind the last
        frame of a stream, and those that came when a frame was predicted only."""
        return sum(stage.num_dropped for stage in self._parts.stages.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        if self._results.closed:
            return
        self._results.closed = True
        self._loop.abandon()
        self._results.close()
        self._parts.driver.close(f"{type(error).__name__}: {told(error)}")
        self._keeper.close(error)


def _check_tensors(value: Any, name: str) -> None:
    """Raise ``InputError`` if a frame or a target holds no tensor."""
    if not tree.tensors(value):
        kind = type(value).__name__
        remedy = "torch.from_numpy makes one" if kind == "ndarray" else "give a tensor"
        raise InputError(f"{name} is a {kind} and holds no tensor; {remedy}, or skip it")
