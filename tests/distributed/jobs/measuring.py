"""Ranks that measure their links, one of which goes away or falls silent first."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import PenstockError
from penstock.engine.transport.link_meter import measure_cluster
from tests.kit.launch import stall

DEADLINE_SECONDS = 6.0
LONG_SECONDS = 350.0
"""A deadline that must not pass."""
VICTIM = 1


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    # torchrun ends the survivors of a failed job by this signal; here they must end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()

    def stop(done: int, total: int) -> None:
        if rank == VICTIM and done == 1:  # the link of ranks 0 and 1 is done, that of 0 and 2 next
            if how == "stall":
                stall(folder, {*range(dist.get_world_size())} - {VICTIM}, LONG_SECONDS)
            os._exit(1)

    start = time.perf_counter()
    deadline_seconds = LONG_SECONDS if how == "kill" else DEADLINE_SECONDS
    try:
        measure_cluster(seconds_per_pair=0.1, deadline_seconds=deadline_seconds, progress=stop)
        report = {"kind": "none"}
    except PenstockError as error:
        report = {"kind": type(error).__name__, "message": str(error)}
    report["seconds"] = time.perf_counter() - start
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    os._exit(0)  # the group is broken; taking it down could wait for the victim


if __name__ == "__main__":
    main()
