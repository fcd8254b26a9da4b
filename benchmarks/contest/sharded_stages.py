"""Two stages of two shards each, beside torch's pipelining with FSDP2: seconds of a step.

    python -m benchmarks.contest.sharded_stages [--mbit 800] [--hosts 4] [--rounds 7]

Four processes train the same layers by 1F1B: a pipeline of two stages, of each of which two copies
have a shard. torch has a ``Schedule1F1B`` for each pair of ranks, and ``fully_shard`` around every
layer of a stage; Penstock has the reducer "fully-sharded". They take turns, A B C D, in the same
processes; before, all make the same steps, and weights must be those of the others.

The goal is 1.05 of torch's speed with weights that stay gathered for a step. torch's pipelines keep
what a backward has gathered, so with ``reshard_after_forward`` they gather once per microbatch, and
hold as much; the faster of both counts. Penstock's gathered_for="use" gathers twice and holds two
layers, which torch has nothing like; it is there to be seen.

The four hosts (``shaped_network``) share this machine's few cores, which real ones do not. So a
layer computes its true values and gradients, and then waits until as much time has passed as an
accelerator of a given speed would take (``shaped_training``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import mse_loss

import penstock as pk
from benchmarks.common.alone import publish
from benchmarks.common.turns import Contest, measure_in_turns
from benchmarks.network.shaped_network import SKIPPED, ShapedNetwork, cannot_shape
from benchmarks.network.shaped_training import Work, expect_success, sgd
from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.summing import GatheredFor

STAGES, COPIES = 2, 2
GOAL_SPEED = 1.05
_SAME_STEPS = 2


class Contestant(NamedTuple):
    """One way to train.

    Attributes:
        step: an update; the loss of the minibatch, or this copy's share of it, where it is known.
        weights: those of this rank's stage, whole; all ranks ask for them.
        close: ends it.
    """

    step: Callable[[], Tensor | None]
    weights: Callable[[], list[Tensor]]
    close: Callable[[], None] = lambda: None


def of_torch(sizes: Work, *, frees: bool) -> Contestant:
    """Pipelining × FSDP2, as users write it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (STAGES, COPIES), mesh_dim_names=("pipe", "data"))
    index, copy = mesh["pipe"].get_local_rank(), mesh["data"].get_local_rank()
    layers = sizes.model()
    part: Any = layers[: sizes.depth // 2] if index == 0 else layers[sizes.depth // 2 :]
    for module in (*part, part):
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=frees)
    value = torch.empty(sizes.rows, sizes.width)
    stage = PipelineStage(
        part, index, STAGES, torch.device("cpu"), value.requires_grad_(index > 0),
        torch.empty_like(value).requires_grad_(), group=mesh["pipe"].get_group(),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, sizes.microbatches // COPIES, loss_fn=mse_loss)
    optimizer = sgd(part.parameters())
    inputs, targets = (own.chunk(COPIES)[copy] for own in sizes.batch())

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).detach().mean() / COPIES if losses else None

    return Contestant(step, lambda: [own.full_tensor().detach() for own in part.parameters()])


def of_penstock(sizes: Work, kept: GatheredFor) -> Contestant:
    """The reducer "fully-sharded" with a pipeline of two stages."""
    model = sizes.model()
    layers, half = spine_of(model), sizes.depth // 2
    names = tuple(layer.name for layer in layers)
    plan = Plan(
        model=spine_fingerprint(layers), schedule="1f1b", options={"replicas": [COPIES] * STAGES},
        num_microbatches=sizes.microbatches, num_threads=1,
        stages=(
            StagePlan(layers=names[:half], rank=0), StagePlan(layers=names[half:], rank=COPIES)
        ),
    ).with_reducer("fully-sharded", gathered_for=kept)  # fmt: skip
    pipeline = pk.Pipeline(
        model, plan, loss=mse_loss, optimizer=sgd, transport="process-group", record=False,
        results="none", deadline_seconds=120,
    )  # fmt: skip
    stage = pipeline.stages[dist.get_rank() // COPIES]
    batch, own = sizes.batch(), [layer.name for layer in stage.layers]

    def weights() -> list[Tensor]:
        state = pipeline.gather_state_dict()
        return [state[f"{name}.{key}"] for name in own for key in ("weight", "bias")]

    def step() -> None:
        pipeline.step(*batch)

    return Contestant(step, weights, pipeline.close)


WAYS: dict[str, Callable[[Work], Contestant]] = {
    "torch 1F1B × FSDP2": partial(of_torch, frees=False),
    "torch 1F1B × FSDP2, reshard_after_forward": partial(of_torch, frees=True),
    "Penstock 1F1B, fully sharded": partial(of_penstock, kept="step"),
    "Penstock 1F1B, fully sharded, for each use": partial(of_penstock, kept="use"),
}


def on_one_rank(sizes: Work, rounds: int) -> dict[str, float]:
    """What each process does: seconds of a step of each contestant."""
    torch.set_num_threads(1)
    keep_freed_pages()
    dist.init_process_group("gloo")
    made = {name: build(sizes) for name, build in WAYS.items()}
    weights = []
    for way in made.values():
        for _ in range(_SAME_STEPS):
            way.step()
        weights.append(way.weights())
    for name, others in zip(made, weights, strict=True):
        for theirs, ours in zip(weights[0], others, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    contests = {name: Contest(way.step, 1) for name, way in made.items()}
    measured = measure_in_turns(contests, rounds)
    for way in made.values():
        way.close()
    dist.barrier()
    return {name: own.seconds for name, own in measured.items()}


def on_hosts(sizes: Work, options: argparse.Namespace) -> dict[str, float]:
    """The seconds that all have measured on shaped links."""
    with (
        tempfile.TemporaryDirectory() as name,
        ShapedNetwork(options.hosts, options.mbit) as network,
    ):
        folder = Path(name)
        (folder / "sizes.json").write_text(json.dumps(sizes))
        job = [sys.executable, "-m", "benchmarks.contest.sharded_stages", "--job", name]
        job += ["--rounds", str(options.rounds)]
        per_host = STAGES * COPIES // options.hosts
        expect_success(network.run(job, per_host=per_host, environment={"OMP_NUM_THREADS": "1"}))
        seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
    return seconds


def show(seconds: dict[str, float], mbit: float) -> None:
    """A line for each contestant, and the ratio that is the goal."""
    table = Table("", "s/step", title=f"{mbit:g} Mbit/s", title_justify="left")
    for name, own in seconds.items():
        table.add_row(name, f"{own:.3f}")
    Console(width=100).print(table)
    theirs, ours = min([*seconds.values()][:2]), [*seconds.values()][2]
    reached = "met" if theirs / ours >= GOAL_SPEED else "missed"
    print(f"{theirs / ours:.2f} of torch's speed (goal {GOAL_SPEED}): {reached}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, choices=(2, 4), default=4)
    parser.add_argument("--mbit", type=float, default=800.0)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12, help="linear layers")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of each copy")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="per row and layer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.job is not None:
        sizes = Work(*json.loads((options.job / "sizes.json").read_text()))
        seconds = on_one_rank(sizes, options.rounds)
        if dist.get_rank() == 0:
            (options.job / "seconds.json").write_text(json.dumps(seconds))
        dist.destroy_process_group()
        return 0
    if cannot_shape():
        return SKIPPED
    num_microbatches = COPIES * options.microbatches
    sizes = Work(
        options.width, options.depth, options.rows, num_microbatches, options.wait_ms / 1e3
    )
    layer = 4 * sizes.width * (sizes.width + 1)
    print(
        f"{sizes.depth} layers of {layer / 1e6:.1f} MB on {STAGES} stages of {COPIES} shards, "
        f"{options.microbatches} microbatches each, a forward of a layer "
        f"{1e3 * sizes.rows * sizes.wait_seconds:g} ms"
    )
    show(on_hosts(sizes, options), options.mbit)
    return 0


if __name__ == "__main__":
    publish(main)
