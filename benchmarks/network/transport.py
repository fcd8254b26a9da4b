"""How long it takes to hand a tensor to another rank: shared memory, gloo, and threads in turns.

    torchrun --nproc-per-node=2 -m benchmarks.network.transport [--round-trips 1000]

Prints a Markdown table of microseconds one way, which is half of a round trip: median and 99th
percentile. All ways take turns within one run, so other work on the machine disturbs them alike.
A hand-over between threads copies nothing.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from benchmarks.common.alone import publish
from penstock.engine.transport import Edge, ThreadExchange, Transport, connect
from penstock.engine.transport.rendezvous import Rendezvous

SIZES = {"4 KB": 4 * 2**10, "256 KB": 256 * 2**10, "4 MB": 4 * 2**20}
NUM_TURNS = 10
DEADLINE_SECONDS = 60.0
THERE, BACK = Edge(0, 1, 0), Edge(1, 0, 1)


def round_trips(transport: Transport, tensor: torch.Tensor, count: int) -> list[float]:
    """Rank 0's part: microseconds one way of each."""
    found = []
    for k in range(count):
        start = time.perf_counter()
        transport.send(THERE, k, tensor)
        transport.recv(BACK, k, "rank 0")
        found.append((time.perf_counter() - start) / 2 * 1e6)
    transport.flush()
    return found


def answers(transport: Transport, tensor: torch.Tensor, count: int) -> None:
    """Rank 1's part."""
    for k in range(count):
        transport.recv(THERE, k, "rank 1")
        transport.send(BACK, k, tensor)
    transport.flush()


def between_threads(tensor: torch.Tensor, count: int) -> list[float]:
    """Both parts in this process."""
    near, far = ThreadExchange(2, DEADLINE_SECONDS).transports
    thread = threading.Thread(target=answers, args=(far, tensor, count))
    thread.start()
    found = round_trips(near, tensor, count)
    thread.join()
    return found


def measure(rank: int, num_round_trips: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds by (way, size), on rank 0."""
    meetings = (
        Rendezvous.of_group("connecting", DEADLINE_SECONDS, "see its output") for _ in range(2)
    )
    processes = {
        "shared memory": connect(next(meetings), DEADLINE_SECONDS, way="shared-memory"),
        "gloo": connect(next(meetings), DEADLINE_SECONDS, way="process-group"),
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(NUM_TURNS + 1):
        for size, num_bytes in SIZES.items():
            count = max(2, num_round_trips // NUM_TURNS // (1 if num_bytes < 2**20 else 4))
            tensor = torch.ones(num_bytes // 4)
            for way, transport in processes.items():
                dist.barrier()
                if rank == 1:
                    answers(transport, tensor, count)
                    continue
                times = round_trips(transport, tensor, count)
                found[way, size] += times if turn else []  # the first turn warms up
            dist.barrier()
            if rank == 0:
                times = between_threads(tensor, count)
                found["threads", size] += times if turn else []
    for transport in processes.values():
        transport.close("the benchmark is over")
    return found


def table(found: dict[tuple[str, str], list[float]]) -> str:
    """Markdown."""
    lines = [
        "| one way, µs (median / p99) | " + " | ".join(SIZES) + " |",
        "|---|" + "--:|" * len(SIZES),
    ]
    for way in ("shared memory", "gloo", "threads"):
        cells = []
        for size in SIZES:
            times = sorted(found[way, size])
            median, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
            cells.append(f"{median:,.0f} / {p99:,.0f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round-trips", type=int, default=1000)
    num_round_trips = parser.parse_args().round_trips
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = measure(rank, num_round_trips)
    if rank == 0:
        print(table(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    publish(main)
