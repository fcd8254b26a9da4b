"""Three processes with shared memory, forked without torchrun; they end in one of many ways.

    python shared_memory_ends.py HOW FOLDER

Each rank writes ``report-<rank>.json`` of what it met and how long after the trouble; the parent
prints what it had open, before and after.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from penstock.base.errors import RunError
from penstock.engine.transport import Edge, SharedMemoryExchange
from penstock.engine.transport.base import Patience
from tests.kit import launch

NUM_RANKS = 3
VICTIM = 1
DEADLINE_SECONDS = 3.0
LONG_SECONDS = 350.0
"""A deadline that must not pass."""
NUM_ROUNDS = 40


def in_a_ring(rank, transport):
    """Send to the next, take from the one before, now and then more than ever before."""
    after, before = (rank + 1) % NUM_RANKS, (rank - 1) % NUM_RANKS
    held = []
    for k in range(NUM_ROUNDS):
        size = 1000 * (k % 7) ** 4
        transport.send(Edge(rank, after, 0), k, torch.full((size,), float(rank)))
        held = [*held[-2:], transport.recv(Edge(before, rank, 0), k, f"rank {rank}")]
        assert all(torch.equal(tensor, torch.full_like(tensor, before)) for tensor in held)
    transport.flush()
    return held


def succeed(transport, folder):
    transport.close("the work is done")


def fail(transport, folder):
    transport.fail(f"rank {VICTIM} failed: boom", ())


def kill(transport, folder):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_with_child(transport, folder):
    """A child, such as a DataLoader's worker, has copies of the sockets."""
    child = os.fork()
    if child == 0:
        time.sleep(LONG_SECONDS)
        os._exit(0)
    (folder / "child").write_text(str(child))
    kill(transport, folder)


def stall(transport, folder):
    launch.stall(folder, {*range(NUM_RANKS)} - {VICTIM}, LONG_SECONDS)


def leave(transport, folder):
    """The script ends without a word: the transport is dropped."""


TROUBLES = {t.__name__: t for t in (succeed, fail, kill, kill_with_child, stall, leave)}


def child_of_a_rank(rank, transport):
    """A rank's forked child drops its copies of tensors and ends as a process does."""
    if rank == 0:
        # Only now are the ring's slots free that will be, so that the first one is taken again.
        transport.recv(Edge(1, 0, 1), NUM_ROUNDS, "rank 0")
        for k in range(NUM_ROUNDS):
            transport.send(Edge(0, 1, 1), k, torch.full((100,), float(k)))
            transport.recv(Edge(1, 0, 1), k, "rank 0")
    if rank == 1:
        transport.send(Edge(1, 0, 1), NUM_ROUNDS, None)
        held = transport.recv(Edge(0, 1, 1), 0, "rank 1")
        child = os.fork()
        if child == 0:
            del held, transport
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        transport.send(Edge(1, 0, 1), 0, None)
        for k in range(1, NUM_ROUNDS):
            transport.recv(Edge(0, 1, 1), k, "rank 1")
            transport.send(Edge(1, 0, 1), k, None)
        assert held.unique().tolist() == [0]


def run(rank, how, exchange, folder):
    torch.set_num_threads(1)
    transport = exchange.transport(rank)
    held = in_a_ring(rank, transport)
    child_of_a_rank(rank, transport)
    if rank == VICTIM:
        (folder / "trouble").write_text(str(time.monotonic()))
        TROUBLES[how](transport, folder)
        return
    # Rank 0 waits for one that lives, rank 2 for the victim.
    source = 2 if rank == 0 and how != "stall" else VICTIM
    report = {"kind": "", "message": ""}
    if how == "stall":
        transport.patience = Patience(DEADLINE_SECONDS)
    try:
        transport.recv(Edge(source, rank, 9), 0, f"rank {rank}, waiting")
    except RunError as error:
        report = {"kind": type(error).__name__, "message": str(error)}
        transport.fail(str(getattr(error, "reason", error)), ())
    started = float((folder / "trouble").read_text())
    report["seconds"] = time.monotonic() - started
    report["held"] = len(held)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    transport.close("done")


def opened():
    """What this process has open and mapped; and files that somebody could have left."""
    maps = Path("/proc/self/maps").read_text()
    left = [name for name in os.listdir("/dev/shm") if "penstock" in name]
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:"), left


def main():
    how, folder = sys.argv[1], Path(sys.argv[2])
    before = opened()
    exchange = SharedMemoryExchange(NUM_RANKS, LONG_SECONDS)
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            try:
                run(rank, how, exchange, folder)
                gc.collect()
                os._exit(0)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
        children.append(child)
    exchange.close()
    exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if (folder / "child").exists():
        os.kill(int((folder / "child").read_text()), signal.SIGKILL)
    print(json.dumps({"before": before, "after": opened(), "exits": exits}))


if __name__ == "__main__":
    main()
