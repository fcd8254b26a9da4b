"""Two ranks train with compiled passes and in eager mode, and follow a stream in both ways.

    torchrun ... compiled.py FOLDER

Each rank reports what is not as it should be: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from penstock.base.errors import RunError
from tests.kit.live import LEARN, differences, frames_of, live_plan, pushed, stream_of
from tests.kit.streams import WIDTH
from tests.kit.training import momentum, pipeline_of

TOLERANCE = 1e-9


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)).double()


def batch(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(1)


def trained(schedule: str, compile: object) -> list[torch.Tensor]:
    """Losses, and then the weights that this rank has trained."""
    options = {"loss": F.mse_loss, "optimizer": momentum, "compile": compile}
    with pipeline_of(chain(), schedule, transport="shared-memory", **options) as pipeline:
        losses = [pipeline.step(*batch()) for _ in range(3)]
        return losses + list(pipeline.state_dict().values())


def equal_to_eager_mode() -> Iterator[str]:
    for schedule, compile in (("1f1b", "aot_eager"), ("zb-v", "aot_eager"), ("zb-h1", True)):
        pairs = zip(trained(schedule, compile), trained(schedule, False), strict=True)
        if not all(torch.allclose(*pair, rtol=TOLERANCE, atol=TOLERANCE) for pair in pairs):
            yield f"{schedule} compiled by {compile}"


def refused_on_every_rank() -> Iterator[str]:
    pipeline = pipeline_of(chain(), loss=F.mse_loss, optimizer=momentum, compile="aot_eager")
    pipeline.step(*batch())
    try:
        pipeline.step(*batch(12))
    except RunError as error:
        if "compiled for (4, 6) float64" not in str(error):
            yield str(error)
    else:
        yield "another shape was not refused"


def replayed() -> Iterator[str]:
    def run(replay: bool) -> list:
        model = chain()
        with stream_of(model, live_plan(model, 2), replay=replay) as stream:
            return pushed(stream, frames_of([LEARN] * 8))

    yield from differences(run(True), run(False), TOLERANCE)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [*equal_to_eager_mode(), *replayed(), *refused_on_every_rank()]
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
