"""How long do sums of gradients take on slow links, beside what the formula says?

    python -m benchmarks.network.reducers [--mbit 100 200] [--mb 12.5] [--cases 2,0 3,1 4,2 4,4]
    python -m benchmarks.network.reducers --training [--hosts 4] [--rows 8] [--spares 2]

The first form sums numbers on n hosts with k summation servers in shaped namespaces
(``shaped_network``), and shows the median beside the best split's time at the goodput that one
stream had on the same network just before. Sums are checked in every round. The second form trains
copies of one model with every reducer, and with torch's DistributedDataParallel, in turns; where
there are spare hosts, with one of them as a parameter server, too, and at last while hosts pause at
random (``--pause``), when updates wait for all and when they may be late.

A server's cost is shown as CPU seconds per gigabyte that it received and sent.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.alone import publish
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape
from penstock.core.summation.exchange import SumExchange
from penstock.core.summation.frames import Member, key_of
from penstock.core.summation.server import SummationServer
from penstock.core.summation.split import Owner, best_split

_PORT, _STREAM_PORT = 5600, 5555
_KEY = key_of("benchmark", "reducers")
_SECONDS = 120.0
_TCP_SHARE = 0.953
"""Of the link's bits, what TCP carries for its user."""


class Case(NamedTuple):
    """What is summed.

    Attributes:
        workers, servers: how many of each.
        num_bytes: that each worker holds.
        rounds: how often, after a first one that does not count.
        bytes_per_second: of a link, as owners believe it to be.
    """

    workers: int
    servers: int
    num_bytes: int
    rounds: int
    bytes_per_second: float


def address_of(host: int) -> str:
    """The address of a host of the shaped network."""
    return f"10.77.0.{host + 1}"


def stream(num_bytes: int) -> float | None:
    """Send bytes from host 1 to host 0; bytes per second without the first third, on host 0."""
    rank = int(os.environ["RANK"])
    if rank > 1:
        return None
    if rank == 1:
        with _connected(address_of(0), _STREAM_PORT) as connection:
            connection.sendall(bytes(num_bytes))
        return None
    with socket.create_server((address_of(0), _STREAM_PORT)) as listener:
        connection, _ = listener.accept()
        moments, there, room = [], 0, bytearray(1 << 20)
        while count := connection.recv_into(room):
            there += count
            moments.append((time.monotonic(), there))
        connection.close()
    begin = next(moment for moment in moments if moment[1] > num_bytes / 3)
    return (moments[-1][1] - begin[1]) / (moments[-1][0] - begin[0])


def _connected(host: str, port: int) -> socket.socket:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            return socket.create_connection((host, port), 5.0)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def sum_up(case: Case, folder: Path) -> None:
    """One host's part: a worker, or a server that ends when all workers have."""
    rank = int(os.environ["RANK"])
    server = SummationServer(address_of(rank), _PORT, _KEY)
    if rank >= case.workers:
        before = time.process_time()
        while len(list(folder.glob("done-*"))) < case.workers:
            time.sleep(0.1)
        moved = server.sent * 2 / 1e9  # as much comes as goes
        (folder / f"server-{rank}").write_text(json.dumps([time.process_time() - before, moved]))
        server.close()
        return
    count = case.workers + case.servers
    for host in range(count):
        _connected(address_of(host), _PORT).close()  # until all listen
    owners = [
        Owner(f"host {host}", (address_of(host), _PORT), _KEY, case.bytes_per_second)
        for host in range(count)
    ]
    small = SumExchange(Member(bytes(16), 1, rank, case.workers), owners[: case.workers], server)
    large = SumExchange(Member(bytes(16), 0, rank, case.workers), owners, server)
    given = {0: np.full(case.num_bytes // 4, rank + 1, np.float32)}
    sums = {0: np.zeros(case.num_bytes // 4, np.float32)}
    barrier = {0: np.ones(1, np.float32)}, {0: np.zeros(1, np.float32)}
    expected, times = case.workers * (case.workers + 1) / 2, []
    for number in range(case.rounds + 1):
        sums[0].fill(0)
        small.begin(number, *barrier)
        small.wait(_SECONDS, f"host {rank}")
        start = time.monotonic()
        large.begin(number, given, sums)
        large.wait(_SECONDS, f"host {rank}")
        times.append((start, time.monotonic()))
        if not (sums[0] == expected).all():
            sys.exit("a sum is wrong")
    small.begin(case.rounds + 1, *barrier)
    small.wait(_SECONDS, f"host {rank}")
    (folder / f"done-{rank}").write_text(json.dumps(times))
    for exchange in (small, large):
        exchange.close()
    server.close(_SECONDS)


def on_network(case: Case, mbit: float) -> tuple[float, list[float], float]:
    """(bytes per second of one stream, seconds of each round, CPU seconds per gigabyte of a
    server)."""
    hosts = max(case.workers + case.servers, 2)
    with tempfile.TemporaryDirectory() as name, ShapedNetwork(hosts, mbit) as network:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks.network.reducers", "--job", name, "--case"]
        for what in ("stream", json.dumps(case)):
            if code := network.run([*command, what], environment={"OMP_NUM_THREADS": "1"}):
                sys.exit(f"a host ended with exit code {code}")
        goodput = json.loads((folder / "goodput").read_text())
        times = [json.loads(path.read_text()) for path in sorted(folder.glob("done-*"))]
        costs = [json.loads(path.read_text()) for path in folder.glob("server-*")]
    seconds = [
        max(end for _, end in round_) - max(start for start, _ in round_)
        for round_ in zip(*times, strict=True)
    ][1:]
    moved = sum(gigabytes for _, gigabytes in costs)
    return goodput, seconds, sum(cpu for cpu, _ in costs) / moved if moved else 0.0


def show_sums(options: argparse.Namespace) -> None:
    """A line for each rate and case."""
    print(f"{'Mbit/s':>7} {'n,k':>5} {'goodput':>8} {'formula':>8} {'measured':>8} {'ratio':>6}"
          f" {'ring':>7} {'CPU-s/GB':>9}")  # fmt: skip
    for mbit in options.mbit:
        nominal = mbit * 1e6 / 8
        for workers, servers in options.cases:
            num_bytes = int(options.mb * 1e6) // 4 * 4
            believed = nominal * _TCP_SHARE
            case = Case(workers, servers, num_bytes, options.rounds, believed)
            goodput, seconds, cost = on_network(case, mbit)
            formula = best_split(num_bytes, [goodput] * workers, [goodput] * servers).seconds
            measured = statistics.median(seconds)
            ring = 2 * (workers - 1) / workers * num_bytes / goodput
            print(
                f"{mbit:7g} {workers},{servers:<3} {goodput / nominal:7.1%} {formula:7.3f}s "
                f"{measured:7.3f}s {measured / formula:6.3f} {ring:6.3f}s {cost:9.2f}",
                flush=True,
            )


def train(options: argparse.Namespace, folder: Path) -> None:
    """One host's part in training copies with every reducer; spare hosts serve."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    import penstock as pk
    from penstock.planning.plans import Plan

    rank = int(os.environ["RANK"])
    if rank >= options.hosts:
        server = SummationServer(address_of(rank), _PORT, key_of("benchmark", "job"))
        while not (folder / "times").exists():
            time.sleep(0.1)
        server.close()
        return
    os.environ["WORLD_SIZE"] = str(options.hosts)
    os.environ["PENSTOCK_SECRET"] = "benchmark"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        width = round((options.mb * 1e6 / 4 / 4) ** 0.5)
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    rows = options.rows * options.hosts
    inputs = torch.randn(rows, model()[0].in_features)
    copy = DistributedDataParallel(model())
    optimizer, own = sgd(copy.parameters()), inputs.chunk(options.hosts)[rank]

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(copy(own), own).backward()
        optimizer.step()

    steps: dict[str, Any] = {}
    took = defaultdict(list)
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.json")):
            pipeline = pk.Pipeline(
                model(), Plan.load(path), loss=mse_loss, optimizer=sgd, results="none",
                transport="process-group", record=False,
            )  # fmt: skip
            stack.enter_context(pipeline)
            steps[path.stem] = partial(pipeline.step, inputs, inputs)
        steps["DDP"] = step
        for _ in range(options.rounds + 2):
            for way, train_once in steps.items():  # in turns, since a machine's load changes
                dist.barrier()
                start = time.perf_counter()
                train_once()
                dist.barrier()
                took[way].append(time.perf_counter() - start)
    # The first two do not count: nothing leaves early before a step has counted gradients.
    seconds = {way: statistics.median(times[2:]) for way, times in took.items()}
    if rank == 0:
        (folder / "times").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def train_with_servers(options: argparse.Namespace, folder: Path) -> None:
    """One host's part in training copies with a parameter server, which is the host behind them."""
    import random

    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    import penstock as pk
    from penstock.planning.plans import Plan

    rank = int(os.environ["RANK"])
    if rank > options.hosts:
        return
    os.environ["WORLD_SIZE"] = str(options.hosts + 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = {}
    for name in ("parameter-server", "paused", "paused, stale"):
        pauses = options.pause if name.startswith("paused") else 0.0
        plan = Plan.load(folder / f"{name}.json")
        chance = random.Random(rank)

        def loss(output: Any, target: Any, pauses: float = pauses, chance: Any = chance) -> Any:
            if chance.random() < 0.25:
                time.sleep(4 * pauses)
            return mse_loss(output, target)

        torch.manual_seed(0)
        width = round((options.mb * 1e6 / 4 / 4) ** 0.5)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        batch = (torch.randn(8 * options.hosts, width),) * 2
        with pk.Pipeline(
            model, plan, loss=loss, transport="process-group", results="none",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        ) as pipeline:  # fmt: skip
            pipeline.step(*batch)
            start = time.perf_counter()
            for _ in pipeline.steps([batch] * options.rounds * 4):
                pass
            seconds[name] = (time.perf_counter() - start) / options.rounds / 4
    if rank == 0:
        (folder / "times-served").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def show_training(options: argparse.Namespace) -> None:
    """Seconds of a step with every reducer, predicted and measured, and the ratio of both; beside
    them how many times as long as DDP it takes."""
    import torch
    from msgspec.structs import replace
    from torch.nn.functional import mse_loss

    import penstock as pk
    from penstock.core.cluster import Cluster, Device, Link, SpareMachine

    torch.set_num_threads(1)
    width = round((options.mb * 1e6 / 4 / 4) ** 0.5)
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    rows = torch.randn(options.rows, width)
    graph = pk.profile(
        layers, rows, targets=rows, loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )  # fmt: skip
    for mbit in options.mbit:
        rate = mbit * 1e6 / 8 * _TCP_SHARE
        cluster = Cluster(
            devices=tuple(Device(name=f"host{host}") for host in range(options.hosts)),
            link=Link(bytes_per_second=rate),
            spares=tuple(
                SpareMachine(
                    name=f"spare{spare}",
                    bytes_per_second=rate,
                    address=f"{address_of(options.hosts + spare)}:{_PORT}",
                )
                for spare in range(options.spares)
            ),
        )
        with (
            tempfile.TemporaryDirectory() as name,
            ShapedNetwork(options.hosts + options.spares, mbit) as network,
        ):
            predicted = {}
            ways = ["owners", "sharded", "all-reduce", *["servers"] * bool(options.spares)]
            for way in ways:
                plan = pk.plan(
                    graph, cluster, microbatches=options.hosts, replicas=(options.hosts,),
                    reducer=way,
                )  # fmt: skip
                plan.save(Path(name) / f"{way}.json")
                predicted[way] = plan.step_seconds
            command = [sys.executable, "-m", "benchmarks.network.reducers", "--training"]
            command += ["--job", name, "--mb", str(options.mb), "--rounds", str(options.rounds)]
            command += ["--hosts", str(options.hosts), "--rows", str(options.rows)]
            if code := network.run(command, environment={"OMP_NUM_THREADS": "1"}):
                sys.exit(f"a host ended with exit code {code}")
            measured = json.loads((Path(name) / "times").read_text())
            if options.spares:
                one_spare = replace(cluster, spares=cluster.spares[:1])
                served = pk.plan(
                    graph, one_spare, microbatches=options.hosts, replicas=(options.hosts,),
                    reducer="parameter-server",
                )  # fmt: skip
                predicted["parameter-server"] = served.step_seconds
                served.save(Path(name) / "parameter-server.json")
                for late, stale in (("paused", 0), ("paused, stale", 3)):
                    plan = served.with_reducer("parameter-server", one_spare.spares, stale=stale)
                    plan.save(Path(name) / f"{late}.json")
                served_command = [*command, "--served", "--pause", str(options.pause)]
                if code := network.run(served_command, environment={"OMP_NUM_THREADS": "1"}):
                    sys.exit(f"a host ended with exit code {code}")
                measured |= json.loads((Path(name) / "times-served").read_text())
        print(f"{options.hosts} hosts, {options.spares} spares, {mbit:g} Mbit/s, {options.mb} MB")
        print(f"  {'':16} {'measured':>9} {'predicted':>9} {'ratio':>6} {'of DDP':>7}")
        for way, seconds in measured.items():
            thought = predicted.get(way, 0.0)
            beside = f"{thought:8.3f}s {seconds / thought:6.3f}" if thought else " " * 16
            print(
                f"  {way:16} {seconds:8.3f}s {beside} {seconds / measured['DDP']:7.3f}", flush=True
            )


def _pair(text: str) -> tuple[int, int]:
    workers, servers = text.split(",")
    return int(workers), int(servers)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0])
    parser.add_argument("--mb", type=float, default=12.5, help="that each worker holds")
    parser.add_argument("--cases", type=_pair, nargs="+", default=[(2, 0), (3, 1), (4, 2), (4, 4)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--hosts", type=int, default=4, help="that train")
    parser.add_argument("--rows", type=int, default=8, help="of a host's microbatch")
    parser.add_argument("--spares", type=int, default=2, help="that serve")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds, in the mean")
    parser.add_argument("--served", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    if options.job is not None:
        if options.served:
            train_with_servers(options, options.job)
        elif options.training:
            train(options, options.job)
        elif options.case == "stream":
            goodput = stream(3_000_000)
            if goodput is not None:
                (options.job / "goodput").write_text(json.dumps(goodput))
        else:
            sum_up(Case(*json.loads(options.case)), options.job)
        return 0
    if cannot_shape():
        return SKIPPED
    show_training(options) if options.training else show_sums(options)
    print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s of CPU time", flush=True)
    return 0


if __name__ == "__main__":
    publish(main)
