"""The table of a contest, as text: the same cells in a terminal, in Markdown and on a page."""

from __future__ import annotations

from penstock.base.units import format_bytes, format_seconds
from penstock.drawing.contest.record import ONE_DEVICE, WHOLE_BATCH, ContestRecord, Entry
from penstock.drawing.contest.sentences import summary

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
