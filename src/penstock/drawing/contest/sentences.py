"""What a contest says, in a few sentences: who won, and what the trade is."""

from __future__ import annotations

from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.drawing.contest.record import ContestRecord, Entry

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


def _seconds(entry: Entry) -> float:
    assert entry.step_seconds is not None  # of those that ran
    return entry.step_seconds


def _fastest(record: ContestRecord) -> str:
    best = min(record.finished, key=_seconds)
    one = record.one_device
    said = f"{best.title} took the least time per step, {format_seconds(_seconds(best))}"
    if one is None or best is one:
        return f"{said}." if one is None else f"{said}: nothing was faster here than one device."
    ratio = _seconds(one) / _seconds(best)
    said += f", {ratio:.2f} times as fast as one device"
    if not best.synchronous:
        updates = "an update" if (best.delay or 0) == 1 else f"up to {best.delay or 0:.2g} updates"
        said += f", and pays with gradients that are {updates} old"
    return f"{said}."


def _same(record: ContestRecord) -> str:
    """The fastest of those that compute what one device computes, where another one was faster."""
    best = min(record.finished, key=_seconds)
    exact = [entry for entry in record.finished if entry.synchronous]
    if best.synchronous or not exact:
        return ""
    first = min(exact, key=_seconds)
    return (
        f"Of those that compute what one device computes, {first.title} was fastest "
        f"({format_seconds(_seconds(first))})."
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
        slower = _seconds(least) / min(map(_seconds, record.finished))
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
