"""Learning rates move once with each update, and with nothing else, whoever makes the update."""

from __future__ import annotations

import pytest
import torch

from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import pipeline_of, sgd


def halved(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def rates(pipeline):
    return [group["lr"] for group in pipeline.optimizers.param_groups]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("zb-v", {}),
        ("1f1b", {"clip_norm": 0.05}),
        ("1f1b", {"clip_norm": 0.05, "post_validate": True}),
        ("1f1b", {"clip_norm": 1e6, "post_validate": True}),
        ("1f1b", {"clip_stage_norm": 0.05}),
    ],
)
def test_each_update_halves_every_rate(schedule, options):
    with pipeline_of(
        make_mlp(), schedule, optimizer=sgd, lr_scheduler=halved, **options
    ) as pipeline:
        for _ in range(3):
            pipeline.step(*make_batch(8))
        pipeline.step(*make_batch(8), update=False, share=0.5)
        after = rates(pipeline)
    assert after == pytest.approx([0.1 / 8] * len(after))
