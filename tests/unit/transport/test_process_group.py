"""Messages between two processes over gloo. One job does it all: starting one takes seconds."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport import Edge, Noted, ProcessGroupTransport, groups
from penstock.engine.transport.base import NOTE_BYTES, SHARED_TAGS
from tests.kit.launch import forked
from tests.kit.waiting import until

DEADLINE_SECONDS = 2.0
SOON_SECONDS = 150.0  # on a machine that may stand still for a while; far less than a deadline
FORWARD, BACKWARD = Edge(0, 1, 0), Edge(1, 0, 1)
MANY = 80  # more than may be under way
SIZES = (10, 5_000, 10, 200_000, 0, 4_000, 300_000, 1)  # grow, shrink, grow


def transport_of(deadline_seconds, *, near):
    """Between two ranks that believe to be on one host, or not."""
    ranks = frozenset({0, 1}) if near else frozenset({dist.get_rank()})
    return ProcessGroupTransport(groups.make_group(60), ranks, deadline_seconds)


def value_of(microbatch, size):
    return {
        "hidden": torch.full((size,), float(microbatch)),
        "mask": torch.arange(7) % 2 == microbatch % 2,
        "half": torch.full((3, 1), microbatch, dtype=torch.bfloat16).t(),
        "rest": (None, True, "text", microbatch),
    }


def same(ours, theirs):
    return ours["rest"] == theirs["rest"] and all(
        ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key])
        for key in ("hidden", "mask", "half")
    )


def sizes_change(rank, transport):
    """One edge, larger and smaller in turn, each answered on the way back with the next size; with
    a note on one of the ways."""
    found = []
    for k, size in enumerate(SIZES):
        there, back = value_of(k, size), value_of(k, SIZES[-k])
        if rank == 0:
            transport.send(FORWARD, k, Noted(there, bytes([k + 1] * NOTE_BYTES)))
            found.append(same(transport.recv(BACKWARD, k, "rank 0"), back))
        else:
            value, note = transport.recv(FORWARD, k, "rank 1")
            found.append(same(value, there) and note == bytes([k + 1] * NOTE_BYTES))
            transport.send(BACKWARD, k, back)
    return found


def many_under_way(rank, transport):
    """Many messages before the first is asked for, taken last first; in both directions."""
    found = []
    for sender, edge in enumerate((FORWARD, BACKWARD)):
        if rank == sender:
            for k in range(MANY):
                transport.send(edge, k, value_of(k, 1000 * k))
        else:
            for k in reversed(range(MANY)):
                found.append(same(transport.recv(edge, k, f"rank {rank}"), value_of(k, 1000 * k)))
    transport.flush()
    return found


def what_was_sent_may_be_overwritten(rank, transport):
    """A sent tensor is its owner's again at once, though the message may still be under way."""
    if rank == 0:
        tensor = torch.ones(100_000)
        transport.send(FORWARD, 0, tensor)
        tensor.zero_()
        transport.flush()
        return []
    time.sleep(0.1)
    return [torch.equal(transport.recv(FORWARD, 0, "rank 1"), torch.ones(100_000))]


def unasked(rank, transport):
    """Between hosts, on an edge that has been used, the next message travels unasked."""
    if rank == 0:
        transport.send(FORWARD, 300, "asked for")
        transport.flush()
        dist.barrier()
        transport.send(FORWARD, 301, "unasked")
        transport.flush()  # raises at the deadline if it has not left
        dist.barrier()
        return []
    found = [transport.recv(FORWARD, 300, "rank 1")]
    dist.barrier()
    dist.barrier()
    return [*found, transport.recv(FORWARD, 301, "rank 1")]


def looked_for(rank, transport):
    """Of sums between hosts one can tell whether they are there, without being in the way of
    receives; ``None`` of all else."""
    there, back = Edge(0, 1, SHARED_TAGS + 5), Edge(1, 0, SHARED_TAGS + 5)
    if rank == 0:
        transport.recv(back, 400, "rank 0")  # it has been asked for 400
        transport.send(there, 400, torch.ones(100_000))  # grows
        transport.flush()
        transport.recv(back, 401, "rank 0")
        transport.send(there, 401, "second")
        transport.flush()
        return []
    found = [transport.has_come(FORWARD, 999), transport.has_come(there, 400)]
    transport.send(back, 400, None)
    found += [
        until(lambda: transport.has_come(there, 400)),
        transport.recv(there, 400, "rank 1").sum().item(),
    ]
    found.append(transport.has_come(there, 401))
    transport.send(back, 401, None)
    return [*found, transport.recv(there, 401, "rank 1")]  # waits for what is looked for


def not_waited_for(rank, transport):
    """What is looked for first may come last: who waits for another message does not wait for it,
    and what is let go of can be looked for again."""
    first, second, back = (Edge(0, 1, SHARED_TAGS + 7), Edge(0, 1, SHARED_TAGS + 8), Edge(1, 0, 3))
    if rank == 0:
        transport.send(second, 500, "second")
        transport.flush()
        transport.recv(back, 500, "rank 0")
        transport.send(first, 500, "first")
        transport.flush()
        return []
    transport.has_come(first, 500)
    transport.has_come(second, 500)
    found = [transport.recv(second, 500, "rank 1")]
    transport.send(back, 500, None)
    return [
        *found,
        until(lambda: transport.has_come(first, 500)),
        transport.recv(first, 500, "rank 1"),
    ]


def dropped(rank, deadline_seconds):
    """A message to a transport that is no more is in nobody's way."""
    transport = transport_of(deadline_seconds, near=False)
    group = transport.group
    if rank == 0:
        transport.send(FORWARD, 0, "before")
        transport.flush()
        dist.barrier()
        transport.send(FORWARD, 1, "too late")
        transport.flush()
        dist.send(torch.ones(3), 1, group=group, tag=9)
        return []
    found = [transport.recv(FORWARD, 0, "rank 1")]
    del transport
    gc.collect()
    dist.barrier()
    block = torch.zeros(3)
    dist.recv(block, 0, group=group, tag=9)
    return [*found, block.tolist()]


def discarded(rank, transport):
    """Messages and failures of a step that was given up."""
    if rank == 0:
        for k in (7, 8):
            transport.send(FORWARD, k, k)
        transport.flush()
        transport.fail("stale", [FORWARD])
        transport.discard(100)
        for k in range(100, 105):
            transport.send(FORWARD, k, "fresh")
        transport.discard(200)  # they leave room, though nobody takes them so far
        transport.flush()
        transport.send(FORWARD, 200, "fresher")
        dist.barrier()
        transport.flush()
        return []
    found = [transport.recv(FORWARD, 8, "rank 1")]  # 7 is early now
    transport.discard(100)
    found.append(transport.recv(FORWARD, 100, "rank 1"))
    transport.discard(200)
    dist.barrier()
    found.append(transport.recv(FORWARD, 200, "rank 1"))
    return [*found, len(transport._early)]


def goodbye(rank, near):
    """A rank that has closed is missed at once, after what it sent before."""
    transport = transport_of(4 * SOON_SECONDS, near=near)
    start = time.monotonic()
    if rank == 0:
        transport.send(FORWARD, 0, "sent before")
        transport.close("training is over")
        transport.close("again")
        found = [time.monotonic() - start]
        try:
            transport.send(FORWARD, 1, None)
        except RunError as error:
            found.append(str(error))
        dist.barrier()
        return found
    found = [transport.recv(FORWARD, 0, "rank 1")]
    for _ in range(2):
        try:
            transport.recv(FORWARD, 1, "rank 1")
        except PeerError as error:
            found.append(str(error))
    found.append(time.monotonic() - start)
    dist.barrier()
    return found


def failure(rank, transport):
    """News of a failure, in a text that is hard to send; then silence."""
    if rank == 0:
        transport.fail("rank 0 failed: \udc80" + "é" * 5000, [FORWARD])
        time.sleep(DEADLINE_SECONDS + 1)
        return []
    messages = []
    for _ in range(2):
        try:
            transport.recv(FORWARD, 5, "rank 1, waiting at 1RECV_F5")
        except (PeerError, DeadlineError) as error:
            messages.append(f"{type(error).__name__}: {str(error)[:90]}")
    return messages


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    near, far = (transport_of(DEADLINE_SECONDS, near=near) for near in (True, False))
    report = {"goodbye": [goodbye(rank, near) for near in (True, False)]}
    report["dropped"] = dropped(rank, DEADLINE_SECONDS)
    parts = (sizes_change, many_under_way, what_was_sent_may_be_overwritten, discarded)
    for part in parts:
        report[part.__name__] = [part(rank, transport) for transport in (near, far)]
    report["unasked"] = unasked(rank, far)
    report["looked for"] = looked_for(rank, far)
    report["not waited for"] = not_waited_for(rank, far)
    report["failure"] = [failure(rank, transport) for transport in (near, far)]
    start = time.monotonic()
    dist.destroy_process_group()
    report["seconds to leave"] = time.monotonic() - start
    (Path(sys.argv[-1]) / f"report-{rank}.json").write_text(json.dumps(report))


def test_messages_between_two_processes():
    job = forked(__file__, 2)
    assert set(job.reports) == {0, 1}, job.output
    zero, one = job.reports[0], job.reports[1]
    for where in range(2):  # on one host, between hosts
        right = zero["sizes_change"][where], one["sizes_change"][where]
        assert right == ([True] * len(SIZES), [True] * len(SIZES))
        right = zero["many_under_way"][where], one["many_under_way"][where]
        assert right == ([True] * MANY, [True] * MANY)
        assert one["what_was_sent_may_be_overwritten"][where] == [True]
        assert one["discarded"][where] == [8, "fresh", "fresher", 0]
    assert one["unasked"] == ["asked for", "unasked"]
    assert one["looked for"] == [None, False, True, 100_000.0, False, "second"]
    assert one["not waited for"] == ["second", True, "first"]
    assert one["dropped"] == ["before", [1.0, 1.0, 1.0]]
    for (seconds, refused), heard in zip(zero["goodbye"], one["goodbye"], strict=True):
        assert seconds < SOON_SECONDS
        assert "has closed its pipeline (training is over)" in refused
        before, told, again, waited = heard
        assert before == "sent before"
        assert told == again == "rank 1: rank 0 closed its pipeline (training is over)"
        assert waited < SOON_SECONDS
    waiting = "rank 1, waiting at 1RECV_F5"
    for told, silence in one["failure"]:
        assert told.startswith(f"PeerError: {waiting}: cancelled because rank 0 failed:")
        assert silence.startswith(f"DeadlineError: {waiting}: rank 0 did not answer")
    for report in (zero, one):
        assert report["seconds to leave"] < SOON_SECONDS


if __name__ == "__main__":
    main()
