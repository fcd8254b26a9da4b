"""The same training in eager mode and with compiled stages: processor time, and what differs.

    python examples/compiled_stages.py [--schedule zb-v]

Two stages in two threads. The first step of a compiled pipeline traces and compiles each stage,
which takes seconds to minutes; later ones take less processor time, the more so the smaller the
operations are, and with a schedule that splits backwards.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk

WIDTH, ROWS, MICROBATCHES = 128, 128, 8


def build_model() -> nn.Sequential:
    """Eight small layers, alike every time."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    return nn.Sequential(*blocks)


def train(schedule: str, compile: bool | str, num_steps: int) -> tuple[list[float], float]:
    """(losses, milliseconds of processor time per step behind the first)."""
    torch.manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH)
    targets = inputs.roll(1, dims=1)
    model = build_model()
    rows = ROWS // MICROBATCHES
    graph = pk.profile(model, inputs[:rows], loss=F.mse_loss, targets=targets[:rows])
    stages = pk.schedules.build(schedule, num_ranks=2, num_microbatches=MICROBATCHES).num_stages
    cluster = pk.Cluster.local(2)
    plan = pk.plan(graph, cluster, schedule=schedule, microbatches=MICROBATCHES, stages=stages)
    with pk.Pipeline(
        model,
        plan,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        compile=compile,
    ) as pipeline:
        losses = [pipeline.step(inputs, targets).item()]
        start = time.process_time()
        losses += [pipeline.step(inputs, targets).item() for _ in range(num_steps)]
        return losses, (time.process_time() - start) / num_steps * 1e3


def main() -> None:
    """Train in both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="zb-v")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    eager, eager_ms = train(options.schedule, False, options.steps)
    compiled, compiled_ms = train(options.schedule, options.backend, options.steps)
    apart = max(abs(ours - theirs) for ours, theirs in zip(compiled, eager, strict=True))
    print(f"eager     {eager_ms:6.2f} ms of processor time per step, last loss {eager[-1]:.6f}")
    print(f"compiled  {compiled_ms:6.2f} ms, last loss {compiled[-1]:.6f}, {apart:.1e} apart")


if __name__ == "__main__":
    main()
