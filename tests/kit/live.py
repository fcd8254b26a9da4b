"""Small live streams, and what they must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import penstock as pk
from penstock.core.versions import Sideways
from penstock.trial.reference.sideways_replay import SidewaysReplay
from tests.kit.helpers import make_plan
from tests.kit.streams import WIDTH, cuts_of, layered_model

SEED = 3
LEARN, UNLABELLED, PREDICT = "learn", "unlabelled", "predict"


class Given(NamedTuple):
    """One frame as a test gives it."""

    frame: torch.Tensor
    target: torch.Tensor | None = None
    learn: bool = True


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def frames_of(kinds: Sequence[str], rows: int = 2) -> list[Given]:
    """Frames of these kinds."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for kind in kinds:
        frame, target = (
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        made.append(Given(frame, None if kind == UNLABELLED else target, kind != PREDICT))
    return made


def live_plan(model: nn.Module, num_stages: int, policy=None, cuts=None) -> pk.Plan:
    """A plan for a stream, without a profile."""
    policy = Sideways() if policy is None else policy
    plan = make_plan(model, num_stages, 1, policy.family, cuts=cuts)
    return plan.with_versions(policy)


def stream_of(model: nn.Module, plan: pk.Plan, **how: Any):
    how = {"loss": nn.functional.mse_loss, "optimizer": adam, "seed": SEED, **how}
    return pk.stream(model, plan, **how)


def pushed(stream, given: Sequence[Given]) -> list:
    """The results of all frames, each pushed."""
    results = [stream(frame, target, learn=learn) for frame, target, learn in given]
    return [result for result in results if result is not None] + list(stream.rest())


def replayed(plan: pk.Plan, given: Sequence[Given], model: nn.Module | None = None, optimizer=adam):
    """(what an independent loop tells of each frame, the model that it has trained, the loop)."""
    model = layered_model() if model is None else model
    replay = SidewaysReplay(
        model,
        cuts_of(plan),
        nn.functional.mse_loss,
        optimizer,
        rates=plan.versions.rates,
        seed=SEED,
    )
    seen = [replay.push(frame, target, learn=learn) for frame, target, learn in given]
    return [told for told in seen if told is not None] + replay.finish(), model, replay


def differences(results, seen, tolerance: float = 0.0) -> list[str]:
    """Where results differ from what they should be, by default to the last bit."""
    apart = [] if len(results) == len(seen) else [f"{len(results)} results, not {len(seen)}"]
    for result, told in zip(results, seen, strict=False):
        if not _close(result.output, told.output, tolerance):
            apart.append(f"output of frame {result.frame}")
        if (result.loss is None) != (told.loss is None) or (
            told.loss is not None and not _close(result.loss, told.loss, tolerance)
        ):
            apart.append(f"loss of frame {result.frame}")
    return apart


def weights_apart(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Parameters and buffers that differ."""
    theirs = other.state_dict()
    return [
        name
        for name, value in model.state_dict().items()
        if not _close(value, theirs[name], tolerance)
    ]


def _close(value: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(value, other, rtol=tolerance, atol=tolerance)
