"""The ways to learn from a stream that ``benchmarks/streaming/compare.py`` compares.

Each is written as what it computes, frame by frame, not as who computes it where. All of them step
one optimizer per stage, on that stage's newest weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.streaming.sources import Loss
from penstock.trial.reference.sideways_replay import SidewaysReplay

Weights = dict[str, Tensor]
Gradients = list[list[Tensor]]
Factory = Callable[[Any, int], torch.optim.Optimizer]


class Told(NamedTuple):
    """The loss of a frame, before it was learned from."""

    frame: int
    loss: float


class Learner:
    """A model that learns from a stream, every frame in one piece, at its newest weights.

    Args:
        model: a sequence of layers, trained in place.
        num_stages: into how many equal stages it is cut.
        loss: of an output and a target.
        optimizer: of parameters, and of the number of their stage.

    Attributes:
        cosines: by stage, those between the gradients that were applied and the exact ones: of the
            same frame in one piece, at the newest weights of all stages.
    """

    def __init__(
        self, model: nn.Sequential, num_stages: int, loss: Loss, optimizer: Factory
    ) -> None:
        self._model, self._loss = model, loss
        self.num_stages = num_stages
        self._cuts = [len(model) // num_stages] * num_stages
        spans = [range(*span) for span in pairwise(accumulate(self._cuts, initial=0))]
        self._parameters = [_of_layers(dict(model.named_parameters()), span) for span in spans]
        self._spans = spans
        self.cosines: list[list[float]] = [[] for _ in spans]
        self._take(optimizer)

    def _take(self, optimizer: Factory) -> None:
        self._optimizers = [
            optimizer(list(own.values()), stage) for stage, own in enumerate(self._parameters)
        ]

    def see(self, number: int, frame: Tensor, target: Tensor, compare: bool) -> Told | None:
        """Learn from the next frame; tell what came out, if anything did.

        Args:
            number: of the frame, from 0.
            compare: whether to keep cosines of this one.
        """
        loss, gradients = self._gradients(frame, target, self._parameters)
        self._apply(gradients)
        return Told(number, float(loss))

    def _gradients(
        self,
        frame: Tensor,
        target: Tensor,
        weights: Sequence[Weights],
        buffers: Weights | None = None,
    ) -> tuple[Tensor, Gradients]:
        """The loss, and the gradients of each stage.

        Args:
            weights: of each stage, as leaves.
            buffers: those that the model is to have had; the frame changes its own, if there are
                none.
        """
        every = {name: own for part in weights for name, own in part.items()}
        output = functional_call(self._model, {**every, **(buffers or {})}, (frame,))
        loss = self._loss(output, target)
        found = iter(torch.autograd.grad(loss, list(every.values())))
        return loss.detach(), [[next(found) for _ in part] for part in weights]

    def _apply(self, gradients: Gradients) -> None:
        for optimizer, own, found in zip(
            self._optimizers, self._parameters, gradients, strict=True
        ):
            for parameter, gradient in zip(own.values(), found, strict=True):
                parameter.grad = gradient
            optimizer.step()

    def _buffers(self) -> Weights:
        return {name: own.clone() for name, own in self._model.named_buffers()}


class Seldom(Learner):
    """Exact as well, but only every N-th frame: what one device manages that needs N frame times
    for one. The others are not seen."""

    def see(self, number: int, frame: Tensor, target: Tensor, compare: bool) -> Told | None:
        """Learn from every N-th frame."""
        if number % self.num_stages:
            return None
        return super().see(number, frame, target, compare)


class Stashed(Learner):
    """PipeDream's: stage s reads the weights of N−1−s updates ago, forward and backward; an update
    per frame. Stage s holds N−s versions."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._versions = [deque([own], self.num_stages - s) for s, own in enumerate(self._copies())]

    def see(self, number: int, frame: Tensor, target: Tensor, compare: bool) -> Told | None:
        """Learn from the next frame with each stage's oldest version."""
        then = self._buffers() if compare else {}
        reads = [versions[0] for versions in self._versions]
        loss, gradients = self._gradients(frame, target, reads)
        if compare:
            self._compare(frame, target, gradients, then)
        self._apply(gradients)
        for versions, own in zip(self._versions, self._copies(), strict=True):
            versions.append(own)
        return Told(number, float(loss))

    def _compare(self, frame: Tensor, target: Tensor, gradients: Gradients, then: Weights) -> None:
        _, exact = self._gradients(frame, target, self._parameters, then)
        for kept, mine, wanted in zip(self.cosines, gradients, exact, strict=True):
            kept.append(cosine(mine, wanted))

    def _copies(self) -> list[Weights]:
        return [
            {name: weight.detach().clone().requires_grad_() for name, weight in own.items()}
            for own in self._parameters
        ]


class DoubleBuffered(Stashed):
    """PipeDream-2BW's: an update is the mean over N frames, whose gradients are all of the weights
    before the last update. Two versions."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._versions = [deque([own], 2) for own in self._copies()]
        self._sums: Gradients | None = None

    def see(self, number: int, frame: Tensor, target: Tensor, compare: bool) -> Told | None:
        """Learn from the next frame; every N-th makes an update."""
        then = self._buffers() if compare else {}
        reads = [versions[0] for versions in self._versions]
        loss, gradients = self._gradients(frame, target, reads)
        if compare:
            self._compare(frame, target, gradients, then)
        shares = [[part / self.num_stages for part in own] for own in gradients]
        self._sums = shares if self._sums is None else _added(self._sums, shares)
        if number % self.num_stages == self.num_stages - 1:
            self._apply(self._sums)
            self._sums = None
            for versions, own in zip(self._versions, self._copies(), strict=True):
                versions.append(own)
        return Told(number, float(loss))


class Sideways(Learner):
    """PARTIME's: a gradient goes through the newest graph of each stage. One version, one graph."""

    def _take(self, optimizer: Factory) -> None:
        self._given: list[list[Tensor] | None] = [None] * self.num_stages
        self._seen: deque[tuple[Tensor, Tensor]] = deque(maxlen=2 * self.num_stages)
        self._states: deque[Weights] = deque(maxlen=2 * self.num_stages)

        def noted(own: Any) -> torch.optim.Optimizer:
            made = optimizer(own, own.stage)
            made.register_step_pre_hook(lambda *_: self._note(own))
            return made

        self._replay = SidewaysReplay(
            self._model, self._cuts, self._loss, noted, rates="given", seed=0
        )

    def _note(self, own: Any) -> None:
        self._given[own.stage] = [parameter.grad for parameter in own]

    def see(self, number: int, frame: Tensor, target: Tensor, compare: bool) -> Told | None:
        """Run a tick; what comes out is of the frame N−1 ticks ago."""
        self._seen.append((frame, target))
        self._states.append(self._buffers())
        self._given = [None] * self.num_stages
        exact = self._exact() if compare and number >= 2 * self.num_stages else []
        told = self._replay.push(frame, target)
        for kept, mine, wanted in zip(self.cosines, self._given, exact, strict=False):
            assert mine is not None  # the pipeline is full
            kept.append(cosine(mine, wanted))
        return told and Told(told.frame, float(told.loss))

    def _exact(self) -> Gradients:
        """What this tick would apply to stage s, were it exact: the gradient of frame
        t − 2(N−1) + s."""
        gradients = []
        for stage, ago in enumerate(range(2 * (self.num_stages - 1), self.num_stages - 2, -1)):
            # Stage r has run that frame so many ticks ago; its state was another before.
            met = {
                name: own
                for r, span in enumerate(self._spans)
                for name, own in _of_layers(self._states[r - ago - 1], span).items()
            }
            _, found = self._gradients(*self._seen[-ago - 1], self._parameters, met)
            gradients.append(found[stage])
        return gradients


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Of the angle between two gradients of a stage."""
    rows = [torch.cat([part.flatten() for part in own]) for own in (left, right)]
    return float(F.cosine_similarity(*rows, dim=0))


def _of_layers(named: Weights, layers: range) -> Weights:
    """Those whose names begin with the number of one of the layers."""
    return {name: own for name, own in named.items() if int(name.split(".")[0]) in layers}


def _added(sums: Gradients, more: Gradients) -> Gradients:
    return [
        [left + right for left, right in zip(*both, strict=True)]
        for both in zip(sums, more, strict=True)
    ]
