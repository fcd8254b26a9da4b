"""One rank of ``benchmarks.planning.startup``: what it waits for until its first step is done.

In a process that is given a ``RANK``, two ranks in processes; else two in threads of this one.
Nothing of torch or Penstock is loaded before it is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from penstock import LayerGraph


class Phase(NamedTuple):
    """Seconds that a part of the start took, of this process."""

    name: str
    cpu_seconds: float
    wall_seconds: float


def _graph(model: nn.Sequential) -> LayerGraph:
    """A profile of a model whose layers all take as long."""
    from penstock import Layer, LayerGraph
    from penstock.engine.model.spine import spine_of

    seconds = {"forward_seconds": 1, "backward_input_seconds": 1, "backward_weight_seconds": 1}
    spine = spine_of(model)
    return LayerGraph(
        layers=tuple(Layer(name=own.name, signature=own.signature, **seconds) for own in spine)
    )


def main() -> None:
    """Start a pipeline, and print as JSON what each part took."""
    phases: list[Phase] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        cpu, start = time.process_time(), time.perf_counter()
        yield
        wall = time.perf_counter() - start
        phases.append(Phase(name, time.process_time() - cpu, wall))

    with phase("import torch"):
        import torch
        from torch import nn
    with phase("import penstock.training.pipeline"):
        import penstock as pk
        from penstock.training.pipeline import Pipeline
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    graph = _graph(model)
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, schedule="1f1b", stages=2)
    torch.manual_seed(0)  # ranks get the same minibatch
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    with phase("torch's first optimizer"):
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with phase("Pipeline(…)"):
        pipeline = Pipeline(
            model,
            plan,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
    with phase("first step"):
        pipeline.step(inputs, targets)
    with phase("second step"):
        pipeline.step(inputs, targets)
    pipeline.close()
    print(json.dumps(phases))


if __name__ == "__main__":
    main()
