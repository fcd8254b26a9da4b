"""A timeline as a Chrome trace, to open in Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format" (Duque et al., Google, 2016): complete events ``X``, metadata ``M`` and
counters ``C``, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from penstock.core.timing.spans import Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import title_of
from penstock.drawing.timeline.link_rows import label_of, link_rows

_PROCESS, _LINKS = 0, 1
_MICROSECONDS = 1e6
_Event = dict[str, Any]


def chrome(timeline: Timeline, versions: bool = False) -> str:
    """The trace as JSON: a thread per rank, an event per span, a counter of the microbatches in
    flight per rank, and a thread per link that carried anything. One unit of abstract costs becomes
    one second.

    Args:
        versions: whether to say which version of the weights each op read.
    """
    spans = (_event(span, versions) for span in timeline.spans)
    events = chain(_metadata(timeline), spans, _counters(timeline), _links(timeline))
    rows = ",\n".join(msgspec.json.encode(event).decode() for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{rows}\n]}}'


def _event(span: Span, versions: bool) -> _Event:
    op = span.op
    read = {"version": span.version} if versions and span.version is not None else {}
    return {
        "name": str(op),
        "cat": op.kind.value,
        "ph": "X",
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "pid": _PROCESS,
        "tid": span.rank,
        "args": {
            "stage": op.stage,
            "kind": op.kind.value,
            "microbatch": op.microbatch,
            "slice": op.slice,
            **read,
        },
    }


def _metadata(timeline: Timeline) -> Iterator[_Event]:
    name = title_of(timeline)
    yield _named("process_name", 0, {"name": name})
    for rank in range(timeline.num_ranks):
        yield _named("thread_name", rank, {"name": f"rank {rank}"})
        yield _named("thread_sort_index", rank, {"sort_index": rank})


def _named(name: str, rank: int, args: _Event) -> _Event:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": rank, "args": args}


def _links(timeline: Timeline) -> Iterator[_Event]:
    """A thread per link, in a process of their own."""
    rows = link_rows(timeline)
    if rows:
        yield {**_named("process_name", 0, {"name": "links"}), "pid": _LINKS}
    for number, row in enumerate(rows):
        yield {**_named("thread_name", number, {"name": row.name}), "pid": _LINKS}
        for transfer in row.transfers:
            yield {
                "name": f"{transfer.kind} {label_of(transfer)}",
                "cat": transfer.kind,
                "ph": "X",
                "ts": transfer.start * _MICROSECONDS,
                "dur": (transfer.end - transfer.start) * _MICROSECONDS,
                "pid": _LINKS,
                "tid": number,
                "args": {"stage": transfer.stage, "ranks": transfer.ranks},
            }


def _counters(timeline: Timeline) -> Iterator[_Event]:
    for rank, curve in enumerate(timeline.in_flight):
        for time, held in curve:
            yield {
                "name": f"in flight, rank {rank}",
                "ph": "C",
                "ts": time * _MICROSECONDS,
                "pid": _PROCESS,
                "args": {"microbatches": held},
            }
