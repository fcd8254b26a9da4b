"""``ContestRecord``: a contest of methods as one value that is a file; its table and its sentences.

The table has the same cells in a terminal, in Markdown and on a page. A method that did not run
keeps its row, with the reason, because what is impossible here is an answer, too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.base.values import Value
from penstock.drawing.report import doubt_of

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
        others: the most of the cores' time that other programs had while it trained, where that
            disturbed so many of its steps that its times say little; otherwise 0.
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
    others: float = 0.0

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
    def fastest(self) -> Entry:
        """The entry whose steps took the least time, of those that trained to the end."""
        return min(self.finished, key=_step_seconds)

    @property
    def equal_seconds(self) -> float | None:
        """The time that every method had at least: that of the fastest for all of its steps."""
        return _step_seconds(self.fastest) * self.num_steps if self.finished else None

    @property
    def unequal(self) -> tuple[Entry, ...]:
        """Entries that were stopped because they did not compute what one device computes."""
        return tuple(
            entry for entry in self.entries if entry.reason and entry.difference is not None
        )


_MUCH = 1.03
"""Medians that differ by less than this are called equal."""


class Sentence(NamedTuple):
    """One sentence about a contest.

    Attributes:
        text: the sentence.
        doubt: why its ratios and times say little; empty where they say how long something takes.
    """

    text: str
    doubt: str = ""

    def __str__(self) -> str:
        if not self.doubt:
            return self.text
        return f"{self.text.removesuffix('.')} (how fast says little: {self.doubt})."


def summary(record: ContestRecord) -> str:
    """Who was fastest, what that costs, who needed least memory, and who learned soonest."""
    return " ".join(map(str, sentences(record)))


def sentences(record: ContestRecord) -> list[Sentence]:
    """The sentences of ``summary``."""
    ran = record.finished
    if not ran:
        return [Sentence("No method ran; each row says why.")]
    listed = [_fastest(record), _same(record), _smallest(record), _soonest(record)]
    missing = len(record.entries) - len(ran)
    if missing:
        count = count_of(missing, "method")
        listed.append(Sentence(f"{count} could not run here; the rows say why."))
    if record.unequal:
        names = ", ".join(entry.title for entry in record.unequal)
        listed.insert(0, Sentence(f"NOT what one device computes: {names}."))
    return [
        sentence._replace(text=sentence.text[:1].upper() + sentence.text[1:])
        for sentence in listed
        if sentence is not None
    ]


def _step_seconds(entry: Entry) -> float:
    assert entry.step_seconds is not None  # of those that ran
    return entry.step_seconds


def _doubt(*entries: Entry) -> str:
    """Why a ratio of the times of these entries says little."""
    return doubt_of(max(entry.others for entry in entries))


def _fastest(record: ContestRecord) -> Sentence:
    best, alone = record.fastest, record.one_device
    said = f"{best.title} took the least time per step, {format_seconds(_step_seconds(best))}"
    if alone is None:
        return Sentence(f"{said}.", _doubt(best))
    doubt = _doubt(best, alone)
    if best is alone:
        return Sentence(f"{said}: nothing was faster here than one device.", doubt)
    ratio = _step_seconds(alone) / _step_seconds(best)
    said += f", {ratio:.2f} times as fast as one device"
    if not best.synchronous:
        updates = "an update" if (best.delay or 0) == 1 else f"up to {best.delay or 0:.2g} updates"
        said += f", and pays with gradients that are {updates} old"
    return Sentence(f"{said}.", doubt)


def _same(record: ContestRecord) -> Sentence | None:
    """The fastest of those that compute what one device computes, where another one was faster."""
    exact = [entry for entry in record.finished if entry.synchronous]
    if record.fastest.synchronous or not exact:
        return None
    first = min(exact, key=_step_seconds)
    return Sentence(
        f"Of those that compute what one device computes, {first.title} was fastest "
        f"({format_seconds(_step_seconds(first))}).",
        _doubt(first),
    )


def _smallest(record: ContestRecord) -> Sentence | None:
    sized = [entry for entry in record.finished if _held(entry)]
    if len(sized) < 2:
        return None
    least, alone, doubt = min(sized, key=_held), record.one_device, ""
    said = f"{least.title} needed the least memory per device, {format_bytes(_held(least))}"
    if alone is not None and least is not alone and _held(alone):
        said += f" instead of {format_bytes(_held(alone))}"
        slower = _step_seconds(least) / _step_seconds(record.fastest)
        if slower > _MUCH:
            said += f", at {slower:.2g} times the fastest one's time"
            doubt = _doubt(least, record.fastest)
    return Sentence(f"{said}.", doubt)


def _held(entry: Entry) -> int:
    return (entry.memory_bytes if entry.memory_bytes is not None else entry.predicted_bytes) or 0


def _soonest(record: ContestRecord) -> Sentence | None:
    """Who reached the target first."""
    target = record.target
    if target is None:
        return None
    times = [(entry.seconds_to(target), entry) for entry in record.finished]
    reached = [(seconds, entry) for seconds, entry in times if seconds is not None]
    if not reached:
        return Sentence(f"No method reached a {record.loss_name} of {target:.4g}.")
    seconds, first = min(reached, key=lambda pair: pair[0])
    return Sentence(
        f"{first.title} reached a {record.loss_name} of {target:.4g} first, after "
        f"{format_seconds(seconds)}.",
        _doubt(first),
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
    """The meaning of the columns, in a few sentences."""
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
    return " ".join(parts) + _doubtful_times(record)


def doubts(record: ContestRecord, entry: Entry) -> dict[str, str]:
    """By the columns of its row that rest on times which say little, why they do."""
    if not entry.ran:
        return {}
    own = _doubt(entry)
    equal = _doubt(entry, record.fastest)  # whose time all have
    columns = {"time per step": own, "after equal time": equal, "to target": own}
    return {column: doubt for column, doubt in columns.items() if doubt}


def _doubtful_times(record: ContestRecord) -> str:
    """The sentence about methods that other programs disturbed; empty where none was."""
    disturbed = [entry for entry in record.finished if entry.others]
    if not disturbed:
        return ""
    names = ", ".join(entry.title for entry in disturbed)
    return f" Times of {names} say little, and are grey on a page: {_doubt(*disturbed)}."


def _row(record: ContestRecord, entry: Entry) -> tuple[str, ...]:
    if not entry.ran:
        return (entry.title, f"did not run: {entry.reason}", *[""] * (len(COLUMNS) - 2))
    equal, target = record.equal_seconds, record.target
    to_target = None if target is None else entry.seconds_to(target)
    return (
        entry.title,
        entry.where,
        _pair(entry.predicted_seconds, entry.step_seconds, format_seconds),
        _pair(entry.predicted_bytes, entry.memory_bytes, format_bytes),
        _text(entry.moved_bytes, format_bytes),
        _pair(entry.predicted_bubble, entry.bubble, _percent),
        _pair(entry.delay, entry.recorded_delay, "{:.2g}".format),
        _sameness(entry),
        _text(entry.final_loss, "{:.4g}".format),
        _text(None if equal is None else entry.loss_at(equal), "{:.4g}".format),
        "not reached"
        if target is not None and to_target is None
        else _text(to_target, format_seconds),
    )


def _sameness(entry: Entry) -> str:
    if not entry.synchronous:
        return "no: delayed"
    if entry.method in (ONE_DEVICE, WHOLE_BATCH):
        return "itself"
    if entry.difference is None:
        return _NONE
    return "to the bit" if entry.difference == 0 else f"to {entry.difference:.0e}"


def _pair(predicted: float | None, measured: float | None, write: Callable[[Any], str]) -> str:
    before, after = _text(predicted, write), _text(measured, write)
    return before if before == after else f"{before} → {after}"


def _text(value: float | None, write: Callable[[Any], str]) -> str:
    return _NONE if value is None else write(value)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
