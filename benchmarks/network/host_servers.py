"""How long do sums by servers take where several copies share a network card, beside the formula?

    python -m benchmarks.network.host_servers [--hosts 4] [--copies 2] [--spares 2 4] [--mb 12.5]

Every host is a shaped namespace (``shaped_network``) with several processes, which sum inside
first; others serve. Shown is the median of some rounds, from the last rank's first gradient to the
last rank's last sum, beside the best split's time over *machines*, at the goodput that one stream
had on the same network just before; and how long it would take if every copy had a machine's part
(n copies instead of n machines on the same cards). Sums are checked in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.alone import publish
from benchmarks.network.reducers import address_of
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape
from penstock.core.summation.frames import key_of
from penstock.core.summation.server import SummationServer
from penstock.core.summation.split import best_split

_PORT = 5600
_SECONDS = 240.0
_TCP_SHARE = 0.953
"""Of the link's bits, what TCP carries for its user."""


class Case(NamedTuple):
    """What is summed.

    Attributes:
        hosts, copies, spares: how many hosts train, with how many copies each; how many serve.
        num_bytes: that each copy holds.
        rounds: how often, after a first one that does not count.
        bytes_per_second: of a card, as owners believe it to be.
    """

    hosts: int
    copies: int
    spares: int
    num_bytes: int
    rounds: int
    bytes_per_second: float


def on_host(case: Case, words: Sequence[str], folder: Path) -> int:
    """One host's part: its copies, or a server that ends when all copies have."""
    host = int(os.environ["RANK"])
    if host >= case.hosts:
        server = SummationServer(address_of(host), _PORT, key_of("benchmark", "job"))
        end = time.monotonic() + _SECONDS
        while len([*folder.glob("done-*")]) < case.hosts * case.copies and time.monotonic() < end:
            time.sleep(0.1)
        server.close()
        return 0
    copies = [
        subprocess.Popen(
            [*words, "--copy"],
            env={
                **os.environ,
                "RANK": str(host * case.copies + copy),
                "WORLD_SIZE": str(case.hosts * case.copies),
                "PENSTOCK_SECRET": "benchmark",
            },
        )
        for copy in range(case.copies)
    ]
    return max(abs(copy.wait()) for copy in copies)


def sum_up(case: Case, folder: Path) -> None:
    """One copy's part."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from penstock.core.cluster import SpareMachine
    from penstock.engine.reduce.reducer import SharedWeights
    from penstock.engine.reduce.sums import maker_of
    from penstock.engine.transport import connect
    from penstock.engine.transport.rendezvous import Rendezvous
    from penstock.planning.plans.summing import Summing

    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), case.hosts * case.copies
    dist.init_process_group("gloo")
    meeting = Rendezvous.of_group("connecting", _SECONDS, "wait longer")
    transport = connect(meeting, _SECONDS, host=f"host {rank // case.copies}")
    spares = [
        SpareMachine(
            name=f"spare{spare}",
            bytes_per_second=case.bytes_per_second,
            address=f"{address_of(case.hosts + spare)}:{_PORT}",
        )
        for spare in range(case.spares)
    ]
    summing = Summing(
        reducer="servers",
        servers=tuple(spares),
        levels=(tuple(other // case.copies for other in range(count)),),
        bytes_per_second=(case.bytes_per_second,) * count,
    )
    ranks = tuple(range(count))
    layers = [nn.Parameter(torch.zeros(case.num_bytes // 4 // 16)) for _ in range(16)]
    make = maker_of(summing, "00" * 16, [[ranks]], _SECONDS, ranks=[ranks])
    reducer = make(rank, SharedWeights(0, ranks, frozenset({0}), tuple(layers)), transport)
    reducer.open()
    times = []
    for number in range(1, case.rounds + 2):
        for layer in layers:
            layer.grad = torch.full_like(layer, rank + number)
        dist.barrier()
        start = time.monotonic()
        reducer.hand_in(number, 1)
        reducer.advance(averages=False)
        reducer.finish()
        times.append((start, time.monotonic()))
        expected = sum(other + number for other in range(count))
        if not all((layer.grad == expected).all() for layer in layers):
            sys.exit("a sum is wrong")
    dist.barrier()
    (folder / f"done-{rank}").write_text(json.dumps(times[1:]))
    reducer.close(failed=False)
    transport.close("done")
    dist.destroy_process_group()


def measured(case: Case, mbit: float) -> tuple[float, float]:
    """(bytes per second of one stream, median seconds of a round)."""
    with (
        tempfile.TemporaryDirectory() as name,
        ShapedNetwork(case.hosts + case.spares, mbit) as network,
    ):
        folder, environment = Path(name), {"OMP_NUM_THREADS": "1"}
        stream = ["benchmarks.network.reducers", "--job", name, "--case", "stream"]
        own = ["benchmarks.network.host_servers", "--job", name, "--case", json.dumps(case)]
        for words in (stream, own):
            if code := network.run([sys.executable, "-m", *words], environment=environment):
                sys.exit(f"a host ended with exit code {code}")
        goodput = json.loads((folder / "goodput").read_text())
        times = [json.loads(path.read_text()) for path in folder.glob("done-*")]
    rounds = zip(*times, strict=True)
    return goodput, statistics.median(
        max(end for _, end in spans) - max(start for start, _ in spans) for spans in rounds
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--mb", type=float, default=12.5, help="that each copy holds")
    parser.add_argument("--hosts", type=int, default=4, help="that train")
    parser.add_argument("--copies", type=int, default=2, help="on each host")
    parser.add_argument("--spares", type=int, nargs="+", default=[2, 4], help="that serve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--copy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    if options.job is not None:
        case = Case(*json.loads(options.case))
        if options.copy:
            sum_up(case, options.job)
            return 0
        words = [sys.executable, "-m", "benchmarks.network.host_servers"]
        return on_host(
            case, [*words, "--job", str(options.job), "--case", options.case], options.job
        )
    if cannot_shape():
        return SKIPPED
    print(f"{'hosts':>7} {'k':>3} {'formula':>8} {'measured':>9} {'ratio':>6} {'copies':>8}")
    num_bytes = int(options.mb * 1e6) // 64 * 64
    for spares in options.spares:
        believed = options.mbit * 1e6 / 8 * _TCP_SHARE
        case = Case(options.hosts, options.copies, spares, num_bytes, options.rounds, believed)
        goodput, seconds = measured(case, options.mbit)
        servers = [goodput] * spares
        formula = best_split(num_bytes, [goodput] * options.hosts, servers).seconds
        shared = [goodput / options.copies] * (options.hosts * options.copies)
        each = best_split(num_bytes, shared, servers).seconds
        print(
            f"{options.hosts:>4} × {options.copies} {spares:3} {formula:7.3f}s {seconds:8.3f}s "
            f"{seconds / formula:6.3f} {each:7.3f}s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    publish(main)
