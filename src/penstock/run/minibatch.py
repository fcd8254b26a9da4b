"""What goes into a rank's ops, and what comes out of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.run.counting import Peak
from penstock.run.rank.journal import Record
from penstock.run.seals import Call, Mode, Seal, autocast_codes
from penstock.weights.store import Held


def _autocast_here() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }


@contextmanager
def autocast(dtypes: Mapping[str, torch.dtype], enabled: bool) -> Iterator[None]:
    """Autocast on or off for device types."""
    with ExitStack() as stack:
        for device, dtype in dtypes.items():
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


@dataclass(frozen=True)
class Minibatch:
    """One minibatch, cut into microbatches, and these into slices if they have any.

    Attributes:
        step: its number, for random streams.
        inputs: one value per microbatch or, with slices, per slice; likewise below.
        targets: as many, or empty when only outputs are wanted.
        weights: the factor on each one's loss.
        share: the factor on the gradients alone, where several minibatches make one update.
        more_follow: the caller goes on at once, so that what is still open may be settled then.
        num_slices: of a microbatch.
        index: its number in its stream; a synchronous minibatch is a stream of its own.
        first: how many microbatches of the stream come before it.
        base: how many come before the window of its segment.
        drains: it has no microbatches; what is in flight comes to its end.
        synchronous: of an asynchronous pipeline that is flushed after this minibatch.
        failure: what ended the loader behind this minibatch, if it was an error.
        updates: whether weights are updated; otherwise gradients accumulate.
        digests: of the inputs and the targets, to compare with other ranks'; 0: not compared.
        in_loop: it is one of a loop over ``steps``.
        modes: of the layers' modules, to compare with other ranks'; see ``seals.Mode``.
        autocast: device types and dtypes for which the thread that made this had autocast on.
    """

    step: int
    inputs: Sequence[Any]
    targets: Sequence[Any] = ()
    weights: Sequence[float] = ()
    share: float = 1.0
    more_follow: bool = False
    num_slices: int = 1
    index: int = 0
    first: int = 0
    base: int = 0
    drains: bool = False
    synchronous: bool = True
    failure: BaseException | None = None
    updates: bool = True
    digests: tuple[int, int] = (0, 0)
    in_loop: bool = False
    modes: int = 0
    autocast: Mapping[str, torch.dtype] = field(default_factory=_autocast_here)

    @property
    def num_microbatches(self) -> int:
        """How many there are."""
        return len(self.inputs) // self.num_slices

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return bool(self.targets) or self.drains

    @cached_property
    def seal(self) -> bytes:
        """What other ranks must have been given, too; empty if there is nothing to compare."""
        if not self.inputs:
            return b""
        step = Call.LOOP if self.in_loop else Call.STEP
        training = step if self.updates else Call.ACCUMULATE
        # A loader that has raised is told of by the rank itself.
        goes_on = self.more_follow or self.failure is not None
        call = training if self.trains else Call.EVALUATE
        return Seal(
            call,
            goes_on,
            *autocast_codes(self.autocast),
            self.modes if self.trains else Mode.NOT_COMPARED,
            self.num_microbatches,
            self.share,
            *self.digests,
        ).packed()


@dataclass
class Harvest:
    """What a rank has after its ops.

    Attributes:
        records: when each op ran.
        losses: of the microbatches (or slices) whose last stage this rank ran, unweighted.
        outputs: likewise, when there are no targets.
        metrics: likewise, by name.
        norm: of the whole model's gradients, where ranks agree on it.
        peak: the most that the rank held at once, where that is counted.
        number: tells this run of the worker from others.
        versions: of the weights, as each op read them; −1 where it read none; empty where there
            is only one.
        held: the most versions of its stage's weights that the rank held since the stream began.
    """

    records: list[Record] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    norm: Tensor | None = None
    peak: Peak | None = None
    number: int = 0
    versions: list[int] = field(default_factory=list)
    held: Held | None = None


@contextmanager
def modes(minibatch: Minibatch) -> Iterator[None]:
    """What holds in any thread: gradients if there are targets; no autocast beside the forward."""
    training = minibatch.trains
    inference = torch.inference_mode(False) if training else nullcontext()
    with inference, torch.set_grad_enabled(training), autocast(_autocast_here(), enabled=False):
        yield
