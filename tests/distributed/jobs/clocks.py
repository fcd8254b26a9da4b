"""Every rank reads a clock of its own that is wrong by a known amount; what do they find?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.engine.run.drive.joining import clock_offsets

AHEAD = {"a": 0.0, "b": 5.0, "c": -1234.5}


def main() -> None:
    *places, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    report = {}
    for place in places:
        hosts = place.split(",")
        # A group whose ranks are not those of the job: it leaves out rank 0.
        group = dist.new_group(list(range(1, len(hosts) + 1)), backend="gloo")
        if 1 <= rank <= len(hosts):
            report[place] = found_by(rank, hosts, group)
        dist.barrier()
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def found_by(rank: int, hosts: list[str], group: dist.ProcessGroup) -> dict[str, object]:
    ahead = AHEAD[hosts[rank - 1]]
    start = time.perf_counter()
    offsets = clock_offsets(group, hosts, lambda: time.perf_counter() + ahead)
    return {"offsets": offsets, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
