"""Timelines from traces of other engines: the Chrome traces that ``torch.profiler``'s
``export_chrome_trace`` writes, a file for each rank, and those that ``draw`` writes.

An op is an event with its name. ``torch.distributed.pipelining`` names them so (``PP:0F1``, or
``Forward 1`` where each rank has one stage), and with it torchtitan and NeMo AutoModel; in any
other loop, ``with torch.profiler.record_function("0F1"):`` does. What a rank waits for its input
within an event counts as idle: an op begins with the first event inside that computes.
"""

from __future__ import annotations

import gzip
import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from penstock.base.errors import FileError, InputError
from penstock.base.values import (
    MOST_AMOUNT,
    expect,
    is_whole,
    read_stream,
    read_text,
    refused_as,
    shown,
)
from penstock.core.schedule.op import Op
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline

_OP = re.compile(r"(?:PP:)?(\d{1,18}[A-Z]\d{1,18}(?:\.\d{1,18})?)")
_WORDS = re.compile(r"(Forward|Backward) (\d{1,18})")
_RANK = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
_ON_DEVICE, _ON_HOST = "gpu_user_annotation", "user_annotation"
_MESSAGES = re.compile(r"c10d::|record_param_comms|[A-Za-z]+:(?!:)")
"""Events of messages, ``gloo:recv`` as any backend's."""
_MICROSECONDS = 1e-6


class _Event(msgspec.Struct):
    """An event of a trace, as far as it is read."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = -1.0  # where the file has none
    pid: Any = 0
    tid: Any = 0
    args: dict[str, Any] = {}


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _ChromeTrace(msgspec.Struct):
    """A file of events."""

    events: list[_Event] = msgspec.field(name="traceEvents")
    distributed: _Distributed = msgspec.field(name="distributedInfo", default_factory=_Distributed)
    zero: int = msgspec.field(name="baseTimeNanoseconds", default=0)


class _RankEvents(NamedTuple):
    """The events of a rank; times in seconds."""

    rank: int
    named: list[tuple[str, float, float]]


def timeline_of_traces(paths: Sequence[str | os.PathLike[str]], step: int = -1) -> Timeline:
    """The timeline of a step that other engines' traces show; ``Timeline.from_traces`` explains
    the arguments."""
    if isinstance(paths, str | os.PathLike) or not paths:
        raise InputError("give a list of the trace files of all ranks of a pipeline")
    for path in paths:
        expect(path, str | os.PathLike, "a trace", "give the path of its file")
    ranks = [own for path in paths for own in _ranks_of(Path(path))]
    numbers = [own.rank for own in ranks]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise InputError(f"two traces are of rank {twice}; give one file for each rank")
    ranks.sort(key=lambda own: own.rank)
    spans: list[Span] = []
    for row, own in enumerate(ranks):
        spans += _of_step(_ops(own, row), row, step, own.rank)
    _check_whole({span.op.stage for span in spans})
    last = max((span.op.microbatch for span in spans), default=0)
    if last > len(spans):
        raise InputError(
            f"the traces show microbatch {last}, but have only {len(spans)} ops; microbatches are "
            "numbered from 0"
        )
    return Timeline.of(spans, len(ranks), Path(paths[0]).name.split(".")[0], "measured")


def _check_whole(stages: set[int]) -> None:
    """Raise ``InputError`` if there are later stages than one that is not there."""
    # Of n numbers, one below n is missing if the largest is n or more.
    missing = next((stage for stage in range(len(stages)) if stage not in stages), None)
    if missing is not None:
        raise InputError(
            f"the traces show stage {max(stages)}, but not {missing}; give those of all ranks "
            "of one pipeline"
        )


def _ranks_of(path: Path) -> list[_RankEvents]:
    text = _text(path)
    with refused_as(f"{path} is no Chrome trace"):
        trace = msgspec.json.decode(text, type=_ChromeTrace)
    for event in trace.events:
        if event.ph == "X" and event.dur < 0 and _is_op(event):
            raise FileError(f"{path}: the op {event.name} has no duration (dur); trace again")
    drawn = _drawn(trace)
    ranks = drawn or [_RankEvents(_rank_of(trace, path), _profiled(trace))]
    if not any(own.named for own in ranks):
        raise FileError(
            f"{path} has no ops: no event is called PP:0F1, 0F1 or Forward 1; name them with "
            "torch.profiler.record_function"
        )
    return ranks


def _is_op(event: _Event) -> bool:
    return bool(_OP.fullmatch(event.name) or _WORDS.fullmatch(event.name))


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path)
    try:
        with gzip.open(path) as stream:
            return read_stream(cast(BinaryIO, stream), str(path))
    except (OSError, EOFError) as error:
        raise FileError(f"cannot read {path}: {error}") from None


def _rank_of(trace: _ChromeTrace, path: Path) -> int:
    """The rank that a trace says, or its file's name."""
    if trace.distributed.rank is not None:
        return trace.distributed.rank
    match = _RANK.search(path.name)
    if match is None:
        raise FileError(
            f"{path} does not say of which rank it is; call it rank0.json, or profile after "
            "init_process_group"
        )
    return int(match[1])


def _drawn(trace: _ChromeTrace) -> list[_RankEvents]:
    """The ranks of a trace of Penstock's own, which has a thread for each."""
    threads = {
        event.tid: _RANK.fullmatch(str(event.args.get("name", "")))
        for event in trace.events
        if event.name == "thread_name" and event.pid == 0
    }
    if not threads or not all(threads.values()):
        return []
    named: dict[Any, list[tuple[str, float, float]]] = {thread: [] for thread in threads}
    for event in trace.events:
        if event.ph == "X" and event.pid == 0 and _OP.fullmatch(event.name) and event.tid in named:
            named[event.tid].append(_times(event, 0))
    return [_RankEvents(int(match[1]), named[tid]) for tid, match in threads.items() if match]


def _profiled(trace: _ChromeTrace) -> list[tuple[str, float, float]]:
    """Events that are ops, without what they wait for at their beginning."""
    own = [event for event in trace.events if event.ph == "X" and _is_op(event)]
    on_device = [event for event in own if event.cat == _ON_DEVICE]
    if on_device:  # from the first kernel to the last
        return _joined(_times(event, trace.zero) for event in on_device)
    work: dict[tuple[Any, Any], list[float]] = defaultdict(list)
    for event in trace.events:
        if event.ph == "X" and event.cat != _ON_HOST and not _MESSAGES.match(event.name):
            work[event.pid, event.tid].append(event.ts)
    for starts in work.values():
        starts.sort()
    return [_times(_trimmed(event, work[event.pid, event.tid]), trace.zero) for event in own]


def _trimmed(event: _Event, work: list[float]) -> _Event:
    """The event from its first computation on."""
    end = event.ts + event.dur
    place = bisect_left(work, event.ts)
    if place == len(work) or work[place] >= end:
        return event
    return _Event(event.name, ts=work[place], dur=end - work[place])


def _times(event: _Event, zero: int) -> tuple[str, float, float]:
    start = zero * 1e-9 + event.ts * _MICROSECONDS
    return event.name, start, start + event.dur * _MICROSECONDS


def _joined(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Events of one name that overlap, on several streams, as one."""
    joined: list[tuple[str, float, float]] = []
    for name, start, end in sorted(events):
        if joined and joined[-1][0] == name and start <= joined[-1][2]:
            joined[-1] = name, joined[-1][1], max(end, joined[-1][2])
        else:
            joined.append((name, start, end))
    return joined


def _ops(own: _RankEvents, row: int) -> dict[Op, list[tuple[float, float]]]:
    """The times of each op, a pair per step."""
    times: dict[Op, list[tuple[float, float]]] = defaultdict(list)
    for name, start, end in own.named:
        words = _WORDS.fullmatch(name)
        op = Op.parse(f"{row}{words[1][0]}{words[2]}" if words else name.removeprefix("PP:"))
        if op.kind in BUSY and -MOST_AMOUNT < start <= end < MOST_AMOUNT:
            times[op].append((start, end))
    for pairs in times.values():
        pairs.sort()
    return times


def _of_step(
    times: dict[Op, list[tuple[float, float]]], row: int, step: int, rank: int
) -> list[Span]:
    """The spans of a step: the ops' n-th times."""
    count = min(map(len, times.values()), default=0)
    if not is_whole(step) or not -count <= step < count:
        raise InputError(
            f"step is {shown(step)}, but the trace of rank {rank} has {count} whole steps; count "
            "from 0, or from the end with -1"
        )
    number = step % count
    return [Span(op, row, *pairs[number]) for op, pairs in times.items()]
