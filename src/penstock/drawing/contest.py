"""``ContestRecord``: a contest of methods as one value that is a file; its table and its sentences.

The table has the same cells in a terminal, in Markdown and on a page. A method that did not run
keeps its row, with the reason, because what is impossible here is an answer, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.base.units import count_of, format_bytes, format_seconds
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


_MUCH = 1.03
"""Medians that differ by less than this are called equal."""


def summary(record: ContestRecord) -> str:
    """Who was fastest, what that costs, who needed least memory, and who learned soonest."""
    ran = record.finished
    if not ran:
        return "No method ran; each row says why."
    sentences = [_fastest(record), _same(record), _smallest(record), _soonest(record)]
    missing = len(record.entries) - len(ran)
    if missing:
        sentences.append(f"{count_of(missing, 'method')} could not run here; the rows say why.")
    if record.unequal:
        names = ", ".join(entry.title for entry in record.unequal)
        sentences.insert(0, f"NOT what one device computes: {names}.")
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences if sentence)


def _step_seconds(entry: Entry) -> float:
    assert entry.step_seconds is not None  # of those that ran
    return entry.step_seconds


def _fastest(record: ContestRecord) -> str:
    best = min(record.finished, key=_step_seconds)
    one = record.one_device
    said = f"{best.title} took the least time per step, {format_seconds(_step_seconds(best))}"
    if one is None or best is one:
        return f"{said}." if one is None else f"{said}: nothing was faster here than one device."
    ratio = _step_seconds(one) / _step_seconds(best)
    said += f", {ratio:.2f} times as fast as one device"
    if not best.synchronous:
        updates = "an update" if (best.delay or 0) == 1 else f"up to {best.delay or 0:.2g} updates"
        said += f", and pays with gradients that are {updates} old"
    return f"{said}."


def _same(record: ContestRecord) -> str:
    """The fastest of those that compute what one device computes, where another one was faster."""
    best = min(record.finished, key=_step_seconds)
    exact = [entry for entry in record.finished if entry.synchronous]
    if best.synchronous or not exact:
        return ""
    first = min(exact, key=_step_seconds)
    return (
        f"Of those that compute what one device computes, {first.title} was fastest "
        f"({format_seconds(_step_seconds(first))})."
    )


def _smallest(record: ContestRecord) -> str:
    sized = [entry for entry in record.finished if _held(entry)]
    if len(sized) < 2:
        return ""
    least = min(sized, key=_held)
    one = record.one_device
    said = f"{least.title} needed the least memory per device, {format_bytes(_held(least))}"
    if one is not None and least is not one and _held(one):
        said += f" instead of {format_bytes(_held(one))}"
        slower = _step_seconds(least) / min(map(_step_seconds, record.finished))
        if slower > _MUCH:
            said += f", at {slower:.2g} times the fastest one's time"
    return f"{said}."


def _held(entry: Entry) -> int:
    return (entry.memory_bytes if entry.memory_bytes is not None else entry.predicted_bytes) or 0


def _soonest(record: ContestRecord) -> str:
    """Who reached the target first."""
    target = record.target
    if target is None:
        return ""
    times = {entry.title: entry.seconds_to(target) for entry in record.finished}
    reached = {title: seconds for title, seconds in times.items() if seconds is not None}
    if not reached:
        return f"No method reached a {record.loss_name} of {target:.4g}."
    first = min(reached, key=lambda title: reached[title])
    return (
        f"{first} reached a {record.loss_name} of {target:.4g} first, after "
        f"{format_seconds(reached[first])}."
    )


COLUMNS = (
    "method", "where", "time per step", "memory per device", "moved", "bubble", "delay",
    "as one device", "after equal updates", "after equal time", "to target",
)  # fmt: skip
"""The heads; figures that stand as ``a → b`` are predicted and measured."""

_NONE = "–"


def table_rows(record: ContestRecord) -> list[tuple[str, ...]]:
    """A row of cells for each method; of one that did not run, its name and the reason."""
    return [_row(record, entry) for entry in record.entries]


def markdown(record: ContestRecord) -> str:
    """The contest as Markdown: what it says, the table, and how it came about."""
    head = "| " + " | ".join(COLUMNS) + " |"
    rule = "|---|---|" + "--:|" * (len(COLUMNS) - 2)
    lines = [f"| {' | '.join(map(_safe, row))} |" for row in table_rows(record)]
    body = "\n".join([head, rule, *lines])
    return f"{summary(record)}\n\n{body}\n\n{legend(record)} {' '.join(record.notes)}\n"


def legend(record: ContestRecord) -> str:
    """What the columns mean, in a few sentences."""
    name = record.loss_name
    equal = record.equal_seconds
    parts = [
        "Times, memory, bubble and delay: predicted → measured.",
        "Memory is the neediest device's: measured is what was counted of activations, with "
        "weights, gradients and optimizer state as planned.",
        "Moved: bytes that all devices send for a minibatch, by the plan.",
        "As one device: the difference of training losses from those of one device that cuts "
        "minibatches as the method does; whole minibatches are compared with one device, whole "
        "batch, which dropout and batch normalization make another one than one device.",
        f"The {name} after equal updates is that after {record.num_steps} minibatches",
    ]
    if equal is not None:
        parts[-1] += f", after equal time that after {format_seconds(equal)} of training"
        parts[-1] += ", on a straight line between evaluations"
    if record.target is not None:
        parts[-1] += f"; the target is {record.target:.4g}"
    parts[-1] += "."
    return " ".join(parts)


def _row(record: ContestRecord, entry: Entry) -> tuple[str, ...]:
    if not entry.ran:
        return (entry.title, f"did not run: {entry.reason}", *[""] * (len(COLUMNS) - 2))
    equal, target = record.equal_seconds, record.target
    to_target = None if target is None else entry.seconds_to(target)
    return (
        entry.title,
        entry.where,
        _pair(*map(_seconds, (entry.predicted_seconds, entry.step_seconds))),
        _pair(*map(_bytes, (entry.predicted_bytes, entry.memory_bytes))),
        _bytes(entry.moved_bytes),
        _pair(*map(_share, (entry.predicted_bubble, entry.bubble))),
        _pair(*map(_number, (entry.delay, entry.recorded_delay))),
        _sameness(entry),
        _loss(entry.final_loss),
        _loss(None if equal is None else entry.loss_at(equal)),
        "not reached" if target is not None and to_target is None else _seconds(to_target),
    )


def _sameness(entry: Entry) -> str:
    if not entry.synchronous:
        return "no: delayed"
    if entry.method in (ONE_DEVICE, WHOLE_BATCH):
        return "itself"
    if entry.difference is None:
        return _NONE
    return "to the bit" if entry.difference == 0 else f"to {entry.difference:.0e}"


def _pair(predicted: str, measured: str) -> str:
    return predicted if predicted == measured else f"{predicted} → {measured}"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else format_seconds(value)


def _bytes(value: int | None) -> str:
    return _NONE if value is None else format_bytes(value)


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2g}"


def _loss(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
