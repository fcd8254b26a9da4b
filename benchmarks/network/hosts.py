"""Do sums inside hosts first take what the hosts' cards allow, however many copies share each?

    python -m benchmarks.network.hosts [--mbit 100] [--mb 14.2] [--cases 2x4 2x2 4x2 2x1]

Trains copies of one model on hosts with several copies each (``shaped_network``), in turns: with
``owners`` and ``sharded`` inside hosts first, ``owners`` in the order of the ranks, and torch's
DistributedDataParallel. Shown are medians over steps, their ratio to 2(H−1)/H · M/B, which crosses
every card at least in each direction, to DDP in the same run, and how far off the plan is, which
knows the hosts as measured a moment before. B is the link's rate, less what TCP takes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common.alone import publish
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape

if TYPE_CHECKING:
    import torch

    from penstock.core.cluster import Cluster
    from penstock.planning.plans import Plan
    from penstock.planning.plans.summing import ReducerName

DDP, BY_RANKS = "DDP", "owners, by ranks"
_TCP_SHARE = 0.953
"""Of the link's bits, what TCP carries for its user."""
_NOT_COUNTED = 2
"""Steps: nothing leaves early before a step has counted gradients, and connections grow."""


class Case(NamedTuple):
    """How many hosts, and copies on each."""

    hosts: int
    copies: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """From ``2x4``."""
        hosts, _, copies = text.partition("x")
        return cls(int(hosts), int(copies))

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.copies

    def bound(self, num_bytes: int, bytes_per_second: float) -> float:
        """The seconds that a sum takes at least."""
        return 2 * (self.hosts - 1) / self.hosts * num_bytes / bytes_per_second


def model_of(mb: float) -> torch.nn.Sequential:
    """Four layers of so many megabytes together, with the same weights in every process."""
    import torch

    torch.manual_seed(0)
    width = round((mb * 1e6 / 4 / 4) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all; small steps, since targets are noise."""
    import torch

    return torch.optim.SGD(parameters, lr=1e-3)


def measured_hosts(network: ShapedNetwork, case: Case, folder: Path) -> Cluster:
    """The hosts as `penstock measure-cluster` finds them, before anything is planned."""
    import penstock as pk

    path = folder / "cluster"
    words = f"{sys.executable} -m penstock.cli measure-cluster --most-pairs 4 -o {path}.json"
    if code := network.run(["sh", "-c", f"exec {words} >/dev/null"], per_host=case.copies):
        sys.exit(f"measure-cluster ended with exit code {code}")
    path.with_suffix(".json").rename(path)  # what ends so is a plan
    return pk.Cluster.from_json(path.read_text())


def plans(case: Case, cluster: Cluster, options: argparse.Namespace) -> dict[str, Plan]:
    """By name, what Penstock runs."""
    import torch
    from msgspec.structs import replace
    from torch.nn.functional import mse_loss

    import penstock as pk

    layers = model_of(options.mb)
    rows = torch.randn(options.rows, layers[0].in_features)
    graph = pk.profile(layers, rows, targets=rows, loss=mse_loss, optimizer=sgd, ranks=0, repeats=1)
    count = case.num_ranks
    reducers: tuple[ReducerName, ...] = ("owners", "sharded")
    made = {
        reducer: pk.plan(
            graph,
            cluster,
            microbatches=count,
            schedule="1f1b",
            replicas=(count,),
            reducer=reducer,
        )
        for reducer in reducers
    }
    flat = made["owners"].edited(summing=replace(made["owners"].summing, levels=()))
    return {**made, BY_RANKS: flat}


def train(options: argparse.Namespace, folder: Path) -> None:
    """One process's part in training with each way in turns, since a machine's load changes."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    import penstock as pk
    from penstock.planning.plans import Plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs = torch.randn(options.rows * dist.get_world_size(), model_of(options.mb)[0].in_features)
    steps: dict[str, Callable[[], object]] = {}
    took: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.json")):
            pipeline = pk.Pipeline(
                model_of(options.mb), Plan.load(path), loss=mse_loss, optimizer=sgd, results="none",
                record=False, deadline_seconds=120,
            )  # fmt: skip
            stack.enter_context(pipeline)
            steps[path.stem] = partial(pipeline.step, inputs, inputs)
        steps[DDP] = _data_parallel(model_of(options.mb), inputs)
        for _ in range(options.rounds + _NOT_COUNTED):
            for way, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                took[way].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        medians = {way: statistics.median(times[_NOT_COUNTED:]) for way, times in took.items()}
        (folder / "times").write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def _data_parallel(model: torch.nn.Sequential, inputs: torch.Tensor) -> Callable[[], None]:
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    copy = DistributedDataParallel(model)
    optimizer = sgd(copy.parameters())
    own = inputs.chunk(dist.get_world_size())[dist.get_rank()]

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(copy(own), own).backward()
        optimizer.step()

    return step


class Taken(NamedTuple):
    """Seconds of a step with one way: the median, and what the plan predicts, if it does."""

    seconds: float
    predicted: float | None


def measured(case: Case, options: argparse.Namespace) -> dict[str, Taken]:
    """The seconds of a step with each way."""
    with (
        tempfile.TemporaryDirectory() as name,
        ShapedNetwork(case.hosts, options.mbit) as network,
    ):
        folder = Path(name)
        chosen = plans(case, measured_hosts(network, case, folder), options)
        for way, plan in chosen.items():
            plan.save(folder / f"{way}.json")
        command = [sys.executable, "-m", "benchmarks.network.hosts", "--job", name]
        command += ["--mb", str(options.mb), "--rounds", str(options.rounds)]
        command += ["--rows", str(options.rows)]
        one_thread = {"OMP_NUM_THREADS": "1"}
        if code := network.run(command, environment=one_thread, per_host=case.copies):
            sys.exit(f"a process ended with exit code {code}")
        times: dict[str, float] = json.loads((folder / "times").read_text())
    # The plan that is run in the order of the ranks was priced with hosts first.
    foretold = {way: plan.step_seconds for way, plan in chosen.items() if way != BY_RANKS}
    return {way: Taken(seconds, foretold.get(way)) for way, seconds in times.items()}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of each card, in Mbit/s")
    parser.add_argument("--mb", type=float, default=14.2, help="of weights")
    parser.add_argument("--rows", type=int, default=8, help="of a copy's microbatch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cases",
        type=Case.parse,
        nargs="+",
        default=[*map(Case.parse, ("2x4", "2x2", "4x2", "2x1"))],
    )
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.job is not None:
        train(options, options.job)
        return 0
    if cannot_shape():
        return SKIPPED
    num_bytes = sum(parameter.nbytes for parameter in model_of(options.mb).parameters())
    rate = options.mbit * 1e6 / 8 * _TCP_SHARE
    columns = f"{'seconds':>8} {'/ bound':>8} {'/ DDP':>6} {'predicted':>10}"
    print(f"{'hosts x copies':16} {'way':18} {columns}")
    for case in options.cases:
        times, bound = measured(case, options), case.bound(num_bytes, rate)
        for way, (seconds, predicted) in times.items():
            error = "" if predicted is None else f"{predicted / seconds - 1:+10.1%}"
            print(
                f"{case.hosts} x {case.copies:<12} {way:18} {seconds:7.3f}s {seconds / bound:8.2f} "
                f"{seconds / times[DDP].seconds:6.2f} {error}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    publish(main)
