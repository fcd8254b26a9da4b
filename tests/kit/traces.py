"""Chrome traces, as torch's profiler writes them."""

from __future__ import annotations

import json


def event(name, start, seconds, cat="user_annotation", tid=1):
    return {
        "name": name, "ph": "X", "cat": cat, "ts": start * 1e6, "dur": seconds * 1e6, "pid": 1,
        "tid": tid,
    }  # fmt: skip


def trace_file(path, events, **fields):
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [], **fields}))
    return path


def traced(timeline, folder, steps=1, names="PP:{}", waits=0.0):
    """What torch's profiler would write of a timeline, a file per rank, several steps behind each
    other; each op's event begins so much before it computes."""
    paths = []
    for rank, spans in enumerate(timeline.by_rank):
        events = []
        for step in range(steps):
            for span in spans:
                start = span.start + step * 100
                name = names.format(span.op)
                events.append(event(name, start - waits, span.end - span.start + waits))
                events.append(event("aten::mm", start, (span.end - span.start) / 2, "cpu_op"))
                if waits:
                    events.append(event("c10d::recv_", start - waits / 2, 0.0, "cpu_op"))
        events.append({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "python"}})
        paths.append(
            trace_file(folder / f"t{rank}.json", events, distributedInfo={"rank": rank + 4})
        )
    return paths
