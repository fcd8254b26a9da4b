"""Convolutions by rows, linear layers by parameters: Krizhevsky's "one weird trick" (arXiv
1404.5997), planned for hosts between which it matters and trained here, beside one device.

    python examples/one_weird_trick.py
    torchrun --nproc-per-node=4 examples/one_weird_trick.py

Convolutions have nine tenths of the work and a twentieth of the parameters, so each tensor rank
takes its part of the rows and gradients are summed. Linear layers have the parameters, so each rank
takes its part of those; what goes between ranks then are activations.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk


def build_model(hidden: int = 512) -> nn.Sequential:
    """A small VGG for pictures of 32 × 32."""
    torch.manual_seed(0)
    channels = 3
    layers: list[nn.Module] = []
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    layers += [nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels * 16, hidden), nn.ReLU()]
    layers += [nn.Dropout(0.2), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 100)]
    return nn.Sequential(*layers)


def batches(count: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, 32, 32, generator=generator),
            torch.randint(0, 100, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tensor-ranks", type=int, default=4)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    model, rows = build_model(), arguments.rows
    devices = tuple(pk.Device(name=f"host{k}") for k in range(arguments.tensor_ranks))
    # 10 Gbit/s. Were the network much slower beside this machine's compute, which is measured, one
    # host alone would be faster, and all layers would stay whole.
    link = pk.Link(bytes_per_second=1.25e9, latency_seconds=5e-6)
    hosts = pk.Cluster(devices=devices, link=link)
    graph = pk.profile(model, torch.randn(rows, 3, 32, 32))
    plan = pk.plan(
        graph, hosts, microbatches=1, stages=1, schedule="1f1b", tensor_ranks=len(devices)
    )
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=sgd, seed=0, devices="cpu"
    ) as pipeline:
        if pipeline.is_first:
            for name, how in plan.stages[0].splits.items():
                print(f"{name:>3} {type(model[int(name)]).__name__:<10} {how}")
        for step, batch in enumerate(batches(arguments.steps, rows)):
            loss = pipeline.step(*batch)
            if pipeline.is_first:
                print(f"step {step}: loss {float(loss):.4f}")
        trained = pipeline.gather_state_dict(rank=0)
        if not pipeline.is_first:
            return

    apart = max_difference(trained, train_alone(graph, arguments.steps, rows))
    print(f"furthest from what one device trains: {apart:.1e}")


def train_alone(graph: pk.LayerGraph, steps: int, rows: int) -> dict[str, torch.Tensor]:
    """The same on one rank that has whole layers."""
    model = build_model()
    plan = pk.plan(graph, pk.Cluster.local(1), microbatches=1)
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=sgd, seed=0, transport="threads"
    ) as pipeline:
        for batch in batches(steps, rows):
            pipeline.step(*batch)
    return model.state_dict()


def max_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


if __name__ == "__main__":
    main()
