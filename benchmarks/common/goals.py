"""What the runtime is to reach, and whether a run of ``benchmarks/contest/runtime.py`` did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.common.turns import Measured

Results = Mapping[tuple[str, int], Mapping[str, Measured]]
"""By work and number of microbatches, then by contestant."""

_ALONE = "one process"
_KINDS = ("threads", "processes")
_TWO_STAGES = ("interleaved 1F1B", "interleaved ZB", "ZB-V")
_MOST_CPU_MICROSECONDS = 150
_TIMES_BELOW = 5
_TINY = ("tiny",)
_LONG = ("gpt12", "gpt20")
"""Works whose forwards take 10 ms and more."""

_LARGER = ("gpt7", *_LONG)
_MOST_CPU_BESIDE_BY_HAND = 1.1


class _Pair(NamedTuple):
    """A contestant that is to have a part of another one's speed at least; ``{kind}`` stands for
    threads and for processes."""

    works: tuple[str, ...]
    ours: str
    theirs: str
    least: float


_PAIRS = (
    _Pair(_TINY, "Penstock processes 1F1B", "hand-written processes 1F1B", 1.00),
    _Pair(_TINY, "Penstock threads 1F1B", "hand-written threads 1F1B", 0.95),
    _Pair(_TINY, "Penstock processes 1F1B", "torch 1F1B", 1.60),
    _Pair(_TINY, "Penstock {kind} interleaved 1F1B", "hand-written {kind} interleaved 1F1B", 0.95),
    _Pair(_TINY, "Penstock {kind} ZB-V", "Penstock {kind} 1F1B", 0.85),
    _Pair(_LONG, "Penstock {kind} ZB-V", "Penstock {kind} 1F1B", 1.00),
    _Pair(_LARGER, "Penstock {kind} 1F1B", "hand-written {kind} 1F1B", 0.99),
    _Pair(
        _LARGER, "Penstock {kind} interleaved 1F1B", "hand-written {kind} interleaved 1F1B", 0.97
    ),
)


class Goal(NamedTuple):
    """A row: what is wanted, what was found, and the verdict."""

    wanted: str
    found: str
    verdict: str

    @classmethod
    def of(cls, wanted: str, found: str, met: bool) -> Goal:
        """A goal that was looked at."""
        return cls(wanted, found, "met" if met else "**missed**")


def goals(results: Results) -> list[Goal]:
    """Every goal of which the run has the figures."""
    return [
        *_at_least(results, "tiny", "1F1B", 1.5),
        *_at_least(results, "gpt7", "1F1B", 1.65),
        *_at_least(results, "gpt7", "interleaved 1F1B", 1.70),
        *_not_below_torch(results),
        *_little_cpu(results),
        *_far_below_torch(results),
        *_as_fast(results),
        *_cpu_as_by_hand(results),
    ]


def _at_least(results: Results, work: str, name: str, wanted: float) -> Iterator[Goal]:
    measured = results.get((work, 8), {})
    for kind in _KINDS:
        for full in (f"Penstock {kind} {name}", f"Penstock {kind} {name} (steps)"):
            if full in measured:
                found = _speedup(measured, full)
                title = f"{work}, m = 8, {full}: speed-up ≥ {wanted:.2f}"
                yield Goal.of(title, f"{found:.2f}", found >= wanted)


def _not_below_torch(results: Results) -> Iterator[Goal]:
    for (work, count), measured in results.items():
        names = [name.removeprefix("torch ") for name in measured if name.startswith("torch ")]
        for name in names if work == "gpt20" else ():
            for kind in _KINDS:
                full = f"Penstock {kind} {name}"
                if full in measured:
                    ours, theirs = _speedup(measured, full), _speedup(measured, f"torch {name}")
                    title = f"gpt20, m = {count}, {full}: not below torch"
                    yield Goal.of(title, f"{ours:.2f} beside {theirs:.2f}", ours >= theirs)


def _little_cpu(results: Results) -> Iterator[Goal]:
    for (work, count), measured in results.items():
        for kind in _KINDS:
            full = f"Penstock {kind} 1F1B"
            if work == "tiny" and full in measured:
                found = _cpu_microseconds(measured, full, count)
                title = f"tiny, m = {count}, {full}: CPU overhead ≤ {_MOST_CPU_MICROSECONDS} µs"
                yield Goal.of(title, f"{found:.0f} µs", found <= _MOST_CPU_MICROSECONDS)


def _far_below_torch(results: Results) -> Iterator[Goal]:
    for (work, count), measured in results.items():
        for name in _TWO_STAGES if work == "tiny" else ():
            for kind in _KINDS:
                pair = f"Penstock {kind} {name}", f"torch {name}"
                if all(full in measured for full in pair):
                    ours, theirs = (_cpu_microseconds(measured, full, count) for full in pair)
                    title = f"tiny, m = {count}, {pair[0]}: CPU overhead ≤ torch's ÷ {_TIMES_BELOW}"
                    found = f"{ours:.0f} beside {theirs:.0f} µs"
                    yield Goal.of(title, found, ours * _TIMES_BELOW <= theirs)


def _as_fast(results: Results) -> Iterator[Goal]:
    for pair in _PAIRS:
        for (work, count), measured in results.items():
            for ours, theirs in _of_each_kind(pair.ours, pair.theirs):
                if work in pair.works and ours in measured and theirs in measured:
                    ratio = measured[theirs].seconds / measured[ours].seconds
                    title = f"{work}, m = {count}, {ours}: speed ≥ {pair.least:.2f} × {theirs}"
                    yield Goal.of(title, f"{ratio:.2f}", ratio >= pair.least)


def _cpu_as_by_hand(results: Results) -> Iterator[Goal]:
    # Of longer works, two busy cores slowing each other down are most of what is measured.
    for (work, count), measured in results.items():
        for name in ("1F1B", "interleaved 1F1B") if work == "tiny" else ():
            for pair in _of_each_kind(f"Penstock {{kind}} {name}", f"hand-written {{kind}} {name}"):
                if all(full in measured for full in pair):
                    ours, theirs = (_cpu_microseconds(measured, full, count) for full in pair)
                    most = _MOST_CPU_BESIDE_BY_HAND
                    title = f"{work}, m = {count}, {pair[0]}: CPU overhead ≤ {most} × {pair[1]}"
                    yield Goal.of(
                        title, f"{ours:.0f} beside {theirs:.0f} µs", ours <= most * theirs
                    )


def _of_each_kind(ours: str, theirs: str) -> list[tuple[str, str]]:
    """A pair of names with each kind in its place; once if it has none."""
    return [*dict.fromkeys((ours.format(kind=kind), theirs.format(kind=kind)) for kind in _KINDS)]


def _speedup(measured: Mapping[str, Measured], name: str) -> float:
    return measured[_ALONE].seconds / measured[name].seconds


def _cpu_microseconds(measured: Mapping[str, Measured], name: str, num_microbatches: int) -> float:
    more = measured[name].cpu_seconds - measured[_ALONE].cpu_seconds
    return more / num_microbatches * 1e6
