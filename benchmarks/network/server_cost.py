"""What does a summation server cost, apart from the network that a benchmark emulates?

    python -m benchmarks.network.server_cost [--workers 4] [--part-kb 56 1000 4000]

Workers in processes of their own push parts to one server over the loopback, as fast as it takes
them, and take the sums. Shown are the server's CPU seconds, and how often it slept, per gigabyte
that it received and sent. Where ``reducers`` shapes links, the kernel's timers and queues run at
the expense of whoever is running; here nothing is emulated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import threading
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

import numpy as np

from benchmarks.common.alone import publish
from penstock.core.summation.adding import bytes_of, room_for
from penstock.core.summation.frames import (
    FrameHead,
    FrameKind,
    Member,
    greet,
    key_of,
    receive,
    tune,
)
from penstock.core.summation.server import SummationServer

_KEY = key_of("benchmark", "server cost")


def work(
    address: tuple[str, int], place: int, num_workers: int, part_bytes: int, count: int,
    barrier: Barrier,
) -> None:  # fmt: skip
    """One worker: pushes so many parts, and takes as many sums."""
    with socket.create_connection(address) as connection:
        greet(connection, Member(bytes(16), 0, place, num_workers), _KEY)
        tune(connection)
        length = part_bytes // 4
        numbers, room = np.ones(length, np.float32), room_for(length, 0)

        def push() -> None:
            for number in range(count):
                head = FrameHead(FrameKind.PUSH, start=number * length, length=length)
                connection.sendall(head.packed())
                connection.sendall(bytes_of(numbers))

        barrier.wait()
        pushing = threading.Thread(target=push)
        pushing.start()
        for _ in range(count):
            assert FrameHead.received(connection, {FrameKind.SUM}) is not None
            receive(connection, bytes_of(room))
            assert room[0] == num_workers
        pushing.join()
        barrier.wait()


def cost(num_workers: int, part_bytes: int, num_bytes: int) -> tuple[float, float, float]:
    """(user seconds, system seconds, sleeps) of a server per gigabyte in and out."""
    server = SummationServer("127.0.0.1", 0, _KEY)
    count = max(num_bytes // (2 * num_workers * part_bytes), 1)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_workers + 1)
    workers = [
        context.Process(
            target=work, args=(server.address, place, num_workers, part_bytes, count, barrier)
        )
        for place in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    barrier.wait()
    before = resource.getrusage(resource.RUSAGE_SELF)
    barrier.wait()
    after = resource.getrusage(resource.RUSAGE_SELF)
    for worker in workers:
        worker.join()
    server.close()
    gigabytes = 2 * num_workers * count * (part_bytes // 4 * 4) / 1e9
    return (
        (after.ru_utime - before.ru_utime) / gigabytes,
        (after.ru_stime - before.ru_stime) / gigabytes,
        (after.ru_nvcsw - before.ru_nvcsw) / gigabytes,
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--part-kb", type=float, nargs="+", default=[56.0, 1000.0, 4000.0])
    parser.add_argument("--gb", type=float, default=1.0, help="that the server receives and sends")
    options = parser.parse_args(words)
    print(f"{'part':>10} {'user':>8} {'system':>8} {'CPU-s/GB':>9} {'sleeps/GB':>10}")
    for kilobytes in options.part_kb:
        user, system, sleeps = cost(
            options.workers, round(kilobytes * 1000), round(options.gb * 1e9)
        )
        print(
            f"{kilobytes:7g} kB {user:8.2f} {system:8.2f} {user + system:9.2f} {sleeps:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    publish(main)
