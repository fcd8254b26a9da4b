"""The values that go into a rank's ops and come out of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from penstock.core.timing.spans import TransferKind
from penstock.engine.device.queue import Stamps, taken_up
from penstock.engine.model import tree
from penstock.engine.model.replay import autocast_here, autocasting, remembering_no_casts
from penstock.engine.run.digests import Call, CallDigest, Modes, Next, autocast_codes
from penstock.engine.run.outcome import Peak
from penstock.engine.weights.store import HeldVersions


class StateMark(Protocol):
    """Behind one minibatch of a stream the state of every stage is wanted, each when the stage has
    come to it, while the others and the stream go on.

    Both methods are called in the rank's thread, for each of its stages.
    """

    def forwards_done(self, stage: int) -> None:
        """A stage has run the forwards of the minibatch, and none of the next: buffers are as if
        the stream ended here."""

    def updated(self, stage: int) -> None:
        """A stage has made the last update of the minibatch, and none of the next: weights and the
        optimizer are as if the stream ended here."""


class FrameListener(Protocol):
    """Who wants to know what the model gives for one frame as soon as it has been given."""

    def __call__(self, output: Any, loss: Tensor | None, moment: torch.Event | None) -> None:
        """Called in the thread of the last stage's rank, before the frame's backward.

        Args:
            output: the model's, detached.
            loss: that of the output; ``None`` if there is no target.
            moment: when both are made, where an accelerator makes them.
        """


class Minibatch(msgspec.Struct, frozen=True):
    """One minibatch, cut into microbatches, and these into slices if they have any.

    What ends a stream is a minibatch without microbatches.

    Attributes:
        step: its number, for random streams.
        inputs: one value per microbatch or, with slices, per slice; likewise below.
        targets: as many; empty where only outputs are wanted. If it does not train and has some,
            only losses are wanted.
        weights: the factor on each one's loss.
        share: the factor on the gradients alone, where several minibatches make one update.
        num_slices: how many slices a microbatch has.
        trains: whether gradients are wanted.
        updates: whether weights are updated; otherwise gradients accumulate.
        digests: of the inputs and of the targets, to compare with other ranks'; 0: not compared.
        modes: the modes of the layers' modules, to compare with other ranks' (``digests.Modes``).
        autocast: device types and dtypes for which forwards and the loss run under autocast.
        inputs_moments: when each input is on the device of the rank that computes with it; empty
            where the rank fetches it itself.
        targets_moments: likewise.
        mark: who wants the state behind it; ``None`` if nobody does.
        learns: whether anything may be learned from it; if not, modules are in evaluation mode.
            Only within a live stream; elsewhere ``trains`` says so.
        listener: who wants the output and the loss of the one microbatch of a frame; without, of
            minibatches that train only losses are kept.
        frame: of a frame of a live stream, the number that the caller knows it by.
        more_to_judge: of one that does not train, whether more follow that are evaluated with it.
        lent: whether inputs are the caller's own, who waits: who takes one takes a copy.
    """

    step: int
    inputs: Sequence[Any]
    targets: Sequence[Any] = ()
    weights: Sequence[float] = ()
    share: float = 1.0
    num_slices: int = 1
    trains: bool = True
    updates: bool = True
    digests: tuple[int, int] = (0, 0)
    modes: int = 0
    autocast: Mapping[str, torch.dtype] = msgspec.field(default_factory=dict)
    inputs_moments: Sequence[torch.Event] = ()
    targets_moments: Sequence[torch.Event] = ()
    mark: StateMark | None = None
    learns: bool = True
    listener: FrameListener | None = None
    frame: int | None = None
    more_to_judge: bool = False
    lent: bool = False

    @property
    def num_microbatches(self) -> int:
        """How many there are."""
        return len(self.inputs) // self.num_slices


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a minibatch stands among those before and behind it; a synchronous one is a stream of
    its own.

    Attributes:
        index: its number in its stream, from 0.
        first: how many microbatches of the stream come before it.
        base: how many of them come before the window of its segment.
        synchronous: whether the pipeline is flushed after it; an asynchronous one may be, too.
        more_follow: whether the caller goes on at once, so that what is still open may be settled
            then.
        in_loop: whether it is one of a loop over ``steps``.
        failure: what ended the loader behind this minibatch, if it was an error.
    """

    index: int = 0
    first: int = 0
    base: int = 0
    synchronous: bool = True
    more_follow: bool = False
    in_loop: bool = False
    failure: BaseException | None = None


def call_digest_of(minibatch: Minibatch, position: StreamPosition) -> bytes:
    """The digest of a call, which other ranks must have alike; empty if nothing is compared."""
    if not minibatch.inputs:
        return b""
    step = Call.LOOP if position.in_loop else Call.STEP
    training = step if minibatch.updates else Call.ACCUMULATE
    return CallDigest(
        training if minibatch.trains else Call.EVALUATE,
        _behind(minibatch, position),
        *autocast_codes(minibatch.autocast),
        minibatch.modes if minibatch.trains else Modes.NOT_COMPARED,
        minibatch.num_microbatches,
        minibatch.share,
        *minibatch.digests,
    ).packed()


def _behind(minibatch: Minibatch, position: StreamPosition) -> Next:
    if position.failure is not None:
        return Next.LOADER_ERROR
    return Next.MINIBATCH if position.more_follow or minibatch.more_to_judge else Next.NOTHING


@dataclass
class StepResult:
    """The result of a rank's ops on one minibatch.

    Attributes:
        starts, ends: when each op began and ended, on this host's monotonic clock.
        losses: unweighted, by microbatch (or slice) whose last stage this rank ran.
        outputs: those of the last stage likewise, where there are no targets.
        metrics: by name, and then as ``losses``.
        norm: that of the whole model's gradients, where ranks agree on it.
        peak: the most that the rank held at once, where that is counted.
        number: tells this run of the worker from others.
        versions: which version of the weights each op read; −1 where it read none; empty where
            there is only one.
        held: the most versions of its stage's weights that the rank held since the stream began.
        moment: when all of this is made, where it is made by an accelerator.
        stamps: when each op happened there; ``starts`` and ``ends`` are when the host asked for it.
        moved: what kept links and tiers busy, as ``Transfer`` has it: (kind, stage, number, start,
            end), in seconds of the same clock.
    """

    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    norm: Tensor | None = None
    peak: Peak | None = None
    number: int = 0
    versions: list[int] = field(default_factory=list)
    held: HeldVersions | None = None
    moment: torch.Event | None = None
    stamps: Stamps | None = None
    moved: list[tuple[TransferKind, int, int, float, float]] = field(default_factory=list)

    def take_up(self) -> None:
        """Let this thread go on with what was made, as soon as it is."""
        made = self.losses, self.outputs, self.metrics, self.norm
        taken_up(tree.tensors(made) if self.moment is not None else (), self.moment)


def modes(trains: bool, *, shares: bool = False) -> AbstractContextManager[None]:
    """Modes of torch for any thread: gradients where they are wanted; no autocast beside forwards.

    Args:
        shares: whether forwards wait for those of other members of a group.
    """
    plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if trains and plain and not shares and not autocast_here():
        # As a thread of a rank always is: to say so again takes as long as a small layer.
        return nullcontext()
    return _other_modes(trains, shares)


@contextmanager
def _other_modes(trains: bool, shares: bool) -> Iterator[None]:
    inference = torch.inference_mode(False) if trains else nullcontext()
    alone = _waiting_in_backwards() if shares else nullcontext()
    with inference, torch.set_grad_enabled(trains), autocasting({}), alone:
        yield


@contextmanager
def _waiting_in_backwards() -> Iterator[None]:
    # Autograd has one thread for each accelerator, whichever thread asks for a backward. If that
    # waited for a message of a rank whose own backward has to go through it, nobody would go on. So
    # backwards stay in the rank's thread, on the streams that their forwards had.
    with remembering_no_casts(), torch.autograd.set_multithreading_enabled(False):
        yield
