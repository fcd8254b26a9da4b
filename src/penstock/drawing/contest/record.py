"""``ContestRecord``: what a contest of methods has found, as one value that is a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.base.values import Value

ONE_DEVICE = "one-device"
"""The key of the method that all others are compared with."""


WHOLE_BATCH = "whole"
"""The key of one device that takes minibatches at once; what does so, too, is compared with it."""


class LossPoint(Value, frozen=True, kw_only=True):
    """A method's loss at one moment.

    Attributes:
        step: minibatches trained on.
        loss: on held-out data, or of the last minibatches where there is none; ``None`` if it is
            not finite.
    """

    step: int
    loss: float | None


class Entry(Value, frozen=True, kw_only=True):
    """One method of a contest.

    Attributes:
        method: its key, as ``--methods`` takes it.
        title: shown to people.
        page: the page that explains it, below ``docs/``.
        where: where it ran, in words: threads, processes or emulated devices; empty if it did not.
        reason: why it did not run, or was stopped; empty if it ran to its end.
        synchronous: whether it should compute what one device computes.
        num_devices: how many it takes.
        predicted_seconds, step_seconds: of a minibatch, predicted and measured (the median).
        predicted_bytes, memory_bytes: of the device that needs most, predicted and measured.
        moved_bytes: sent by all devices together for a minibatch, by the plan.
        predicted_bubble, bubble: idle share of the devices' time.
        delay, recorded_delay: age of gradients at the worst stage, in updates, by the formula and
            as the run recorded it.
        difference: the largest difference of a training loss from that of one device with as many
            microbatches, relative to the largest; ``None`` where nothing was compared.
        losses: in the order of steps.
    """

    method: str
    title: str
    page: str = ""
    where: str = ""
    reason: str = ""
    synchronous: bool = True
    num_devices: int = 0
    predicted_seconds: float | None = None
    step_seconds: float | None = None
    predicted_bytes: int | None = None
    memory_bytes: int | None = None
    moved_bytes: int | None = None
    predicted_bubble: float | None = None
    bubble: float | None = None
    delay: float | None = None
    recorded_delay: float | None = None
    difference: float | None = None
    losses: tuple[LossPoint, ...] = ()

    @property
    def ran(self) -> bool:
        """Whether it trained to the end, so that its figures can be compared."""
        return not self.reason and self.step_seconds is not None

    @property
    def final_loss(self) -> float | None:
        """The loss after the last step."""
        return self.losses[-1].loss if self.losses else None

    def curve(self) -> tuple[tuple[float, float], ...]:
        """(seconds, loss) of every point, where a step takes the median time."""
        seconds = self.step_seconds or 0.0
        return tuple(
            (point.step * seconds, point.loss) for point in self.losses if point.loss is not None
        )

    def loss_at(self, seconds: float) -> float | None:
        """The loss after some time of training, between points on a straight line; ``None`` where
        the curve does not reach so far."""
        curve = self.curve()
        for (begin, before), (end, after) in pairwise(curve):
            if begin <= seconds <= end * (1 + 1e-9):
                share = (seconds - begin) / (end - begin) if end > begin else 1.0
                return before + min(share, 1.0) * (after - before)
        return None

    def seconds_to(self, target: float) -> float | None:
        """When the loss first was as low as ``target``; ``None`` if it never was."""
        curve = self.curve()
        if curve and curve[0][1] <= target:
            return curve[0][0]
        for (begin, before), (end, after) in pairwise(curve):
            if after <= target:
                return begin + (before - target) / (before - after) * (end - begin)
        return None


class ContestRecord(Value, frozen=True, kw_only=True):
    """A finished contest.

    Attributes:
        title: the workload's name.
        notes: circumstances, a sentence each: machine, date, data.
        num_devices: that methods could take.
        num_microbatches: per minibatch.
        num_steps: minibatches that each method trained on.
        loss_name: what was evaluated: ``"held-out loss"`` or ``"training loss"``.
        target: the loss to be reached; ``None`` without one.
        entries: in the order in which methods are explained; the first is one device.
    """

    title: str
    notes: tuple[str, ...] = ()
    num_devices: int
    num_microbatches: int
    num_steps: int
    loss_name: str = "held-out loss"
    target: float | None = None
    entries: tuple[Entry, ...]

    @property
    def one_device(self) -> Entry | None:
        """The entry that others are compared with, if it ran."""
        return next(
            (entry for entry in self.entries if entry.method == ONE_DEVICE and entry.ran), None
        )

    @property
    def finished(self) -> tuple[Entry, ...]:
        """The entries that trained to the end."""
        return tuple(entry for entry in self.entries if entry.ran)

    @property
    def equal_seconds(self) -> float | None:
        """The time that every method had at least: that of the fastest for all of its steps."""
        return least_seconds(self.finished, self.num_steps)

    @property
    def unequal(self) -> tuple[Entry, ...]:
        """Entries that were stopped because they did not compute what one device computes."""
        return tuple(
            entry for entry in self.entries if entry.reason and entry.difference is not None
        )


def least_seconds(entries: Sequence[Entry], num_steps: int) -> float | None:
    """The shortest time of these entries for so many steps."""
    times = [entry.step_seconds for entry in entries if entry.step_seconds is not None]
    return min(times) * num_steps if times else None
