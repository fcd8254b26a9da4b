"""Four processes that believe to be on two hosts: 0 and 1 on one, 2 and 3 on the other."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import PeerError, RunError
from penstock.engine.transport import Edge, connect
from penstock.engine.transport.rendezvous import Rendezvous

DEADLINE_SECONDS = 300.0
NUM_ROUNDS = 6


def connected(host=None, way="auto"):
    meeting = Rendezvous.of_group("connecting", 60, "wait longer")
    return connect(meeting, DEADLINE_SECONDS, host, way)


def value_of(source, target, k):
    return {
        "hidden": torch.full((3, 1000 * k), 100.0 * source + 10 * target + k),
        "half": torch.arange(k, dtype=torch.bfloat16),
        "rest": [None, k],
    }


def everyone_to_everyone(rank, num_ranks, transport):
    """Whether all that came was right."""
    others = [other for other in range(num_ranks) if other != rank]
    found = []
    for k in range(NUM_ROUNDS):
        for other in others:
            transport.send(Edge(rank, other, 0), k, value_of(rank, other, k))
        for other in reversed(others):
            got = transport.recv(Edge(other, rank, 0), k, f"rank {rank}")
            meant = value_of(other, rank, k)
            found.append(got["rest"] == meant["rest"])
            found += [torch.equal(got[name], meant[name]) for name in ("hidden", "half")]
    transport.flush()
    return len(found), all(found)


def ways_of(rank, host):
    """How ranks are connected in each case; and what is said where it cannot be."""
    found = {}
    size = dist.get_world_size()
    cases = itertools.product(("auto", "process-group", "shared-memory"), (host, None))
    for way, name in cases:
        try:
            transport = connected(name, way)
        except RunError as error:
            found[f"{way}, {name and 'two hosts'}"] = str(error)
            continue
        works = everyone_to_everyone(rank, size, transport)
        found[f"{way}, {name and 'two hosts'}"] = sorted(transport.near_ranks), works
        dist.barrier()
        transport.close("next")
    return found


def fall_back(rank):
    """Rank 2 can have no shared memory at all."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport = connected()
    try:
        connected(way="shared-memory")
        refused = ""
    except RunError as error:
        refused = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    works = everyone_to_everyone(rank, dist.get_world_size(), transport)
    warned = [str(w.message) for w in caught if "shared memory" in str(w.message)]
    return sorted(transport.near_ranks), works, warned, refused


def news(rank, host):
    """Rank 0 is killed while 1 waits for it, 2 on the other host for 1, and 3 for 2."""
    transport = connected(host)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        transport.recv(Edge(rank - 1, rank, 0), 0, f"rank {rank}, waiting")
        return "nothing", 0
    except PeerError as error:
        told = str(error), time.monotonic() - start
        if rank + 1 < dist.get_world_size():
            transport.fail(error.reason, [Edge(rank, rank + 1, 0)])
        return told


def main():
    # torchrun ends the survivors of a failed job by this signal; here they must end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    host = "host A" if rank < 2 else "host B"
    report = {"ways": ways_of(rank, host), "fall back": fall_back(rank), "news": news(rank, host)}
    (Path(sys.argv[-1]) / f"report-{rank}.json").write_text(json.dumps(report))
    os._exit(1)


if __name__ == "__main__":
    main()
