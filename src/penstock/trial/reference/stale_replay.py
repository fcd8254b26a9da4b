"""The reference of a plan with stale updates: the same journal, one microbatch at a time.

Which gradients met in which update, and which weights each copy had read, is chance: it is how long
everybody took. The pipeline's journal says how it was. This loop takes it from there, and computes
every gradient with the weights that the journal names, and every update from the gradients that it
names, in that order. Nothing else of the pipeline is used.

A stage may read weights that contain gradients of later minibatches, from copies that were ahead.
So microbatches and updates are done as soon as what they need is there, in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.summation.staleness import Contribution, StaleStream
from penstock.core.summation.tree import SumTree
from penstock.core.versions import Flush, Place
from penstock.engine.model.microbatches import Weight, Weighting
from penstock.engine.model.optimizer_factory import OptimizerFactory, SchedulerFactory
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import Skip, spine_of
from penstock.trial.reference.replayed_stage import ReplayedStage
from penstock.trial.reference.single_device import cut_minibatch, run_where_it_draws

CopyOf = Callable[[int, int, int], int]
"""From (stage, microbatch, microbatches in the minibatch) to the copy that runs it, from 0."""


class StaleReplay:
    """Train a model with the updates of a journal, without a pipeline.

    Args:
        model: as given to ``Pipeline``. Its parameters are always the newest weights.
        cuts: how many layers of the spine each stage has.
        num_microbatches: per minibatch; fewer where a minibatch has fewer rows.
        loss: from (output, targets) of a microbatch to a scalar.
        optimizer: makes the optimizer of a stage; called once for each stage with parameters.
        copy_of: which copy of a stage runs a microbatch.
        lr_scheduler: makes the scheduler of an optimizer; stepped after each update of its stage.
        seed: seeds dropout; a pipeline with the same seed draws the same. Default: torch's.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its rows.
        weight: how many terms of the mean the targets of a microbatch hold; default: rows.
    """

    def __init__(  # noqa: PLR0913 - a reference takes what the pipeline takes
        self,
        model: nn.Module,
        cuts: Sequence[int],
        num_microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory,
        *,
        copy_of: CopyOf,
        lr_scheduler: SchedulerFactory | None = None,
        seed: int | None = None,
        reduction: str = "mean",
        weight: Weight | None = None,
    ) -> None:
        layers = spine_of(model)
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._loss_index = len(layers)
        self._copy_of = copy_of
        self._randomness = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._weighting = Weighting(reduction, weight)
        self._num_minibatches = 0
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stages: list[ReplayedStage] = []
        for number, (first, end) in enumerate(pairwise(accumulate(cuts, initial=0))):
            place = Place(number, len(cuts), 0)
            stage = ReplayedStage(layers[first:end], first, place, SumTree.of([0]), Flush())
            stage.take_optimizer(names, optimizer, lr_scheduler, False)
            self._stages.append(stage)

    def train(
        self, batches: Iterable[tuple[Any, Any]], streams: Mapping[int, StaleStream]
    ) -> list[Tensor]:
        """Train on one stream.

        Args:
            batches: (inputs, targets) of each minibatch.
            streams: the journal of each stage that a parameter server updates; others update once
                per minibatch.

        Returns:
            The loss of each minibatch, each microbatch with the weights that it read.

        Raises:
            InputError: the journal cannot be: something would be needed before it is there.
        """
        cut = [cut_minibatch(*batch, self._num_microbatches, self._weighting) for batch in batches]
        work = _StaleWork(self._stages, cut, streams, self._copy_of)
        terms: list[list[Tensor | None]] = [[None] * len(parts) for parts in cut]
        while not work.is_done:
            ready = work.ready()
            for part in ready:
                terms[part.minibatch][part.number] = self._microbatch(part, work)
            if not work.update() and not ready:
                raise InputError(
                    "the journal needs gradients before the weights are there that they were "
                    "computed with; give the journal of this very stream"
                )
        self._num_minibatches += len(cut)
        return [_total(own) for own in terms]

    def _microbatch(self, part: _MicrobatchId, work: _StaleWork) -> Tensor | None:
        copies = [
            stage.copies(Flush(), version)
            for stage, version in zip(self._stages, work.versions_of(part), strict=True)
        ]
        draw = partial(
            run_where_it_draws,
            self._randomness,
            (self._num_minibatches + part.minibatch, part.number),
        )
        skips: dict[str, Skip] = {}
        value, targets, share = work.given(part)
        for stage, own in zip(self._stages, copies, strict=True):
            value = stage.run(own, value, skips, draw)
        loss: Tensor = draw(self._loss_index, True, partial(self._loss, value), targets)
        term = loss * share if share else None  # the mean of no terms is NaN, and NaN · 0 as well
        if term is not None:
            term.backward()  # type: ignore[no-untyped-call]
        for number, own in enumerate(copies):
            work.keep(number, part, {name: leaf.grad for name, leaf in own.items()})
        return None if term is None else term.detach()


class _MicrobatchId(NamedTuple):
    """A microbatch: that of the stream with these numbers."""

    minibatch: int
    number: int


class _StaleWork:
    """The microbatches and updates of a stream: which are done, and which can be done next."""

    def __init__(
        self,
        stages: Sequence[ReplayedStage],
        cut: Sequence[Sequence[tuple[Any, Any, float]]],
        streams: Mapping[int, StaleStream],
        copy_of: CopyOf,
    ) -> None:
        self._stages, self._cut, self._copy_of = stages, cut, copy_of
        alone = _alone(len(cut))
        self._streams = [streams.get(number, alone) for number in range(len(stages))]
        self._left = [
            _MicrobatchId(minibatch, number)
            for minibatch, parts in enumerate(cut)
            for number in range(len(parts))
        ]
        self._gradients: list[dict[_MicrobatchId, Mapping[str, Tensor | None]]] = [
            {} for _ in stages
        ]
        self._num_updates = [0] * len(stages)
        for stage in stages:
            stage.begin()

    @property
    def is_done(self) -> bool:
        """Whether all microbatches and updates are done."""
        counts = [len(stream.updates) for stream in self._streams]
        return not self._left and self._num_updates == counts

    def given(self, part: _MicrobatchId) -> tuple[Any, Any, float]:
        """A microbatch's input, target, and share of the loss."""
        return self._cut[part.minibatch][part.number]

    def versions_of(self, part: _MicrobatchId) -> list[int]:
        """By stage, the version of the weights with which a microbatch was computed."""
        return [
            stream.read_by(Contribution(part.minibatch, self._copy(number, part)))
            for number, stream in enumerate(self._streams)
        ]

    def _copy(self, stage: int, part: _MicrobatchId) -> int:
        return self._copy_of(stage, part.number, len(self._cut[part.minibatch]))

    def ready(self) -> list[_MicrobatchId]:
        """The microbatches all of whose weights are there; they are taken as done."""
        ready = [
            part
            for part in self._left
            if all(
                version <= there
                for version, there in zip(self.versions_of(part), self._num_updates, strict=True)
            )
        ]
        self._left = [part for part in self._left if part not in ready]
        return ready

    def keep(self, stage: int, part: _MicrobatchId, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep a microbatch's gradients at a stage."""
        self._gradients[stage][part] = gradients

    def update(self) -> bool:
        """Make all updates whose gradients are there; whether there were any."""
        made = [self._update(number) for number in range(len(self._stages))]
        return any(made)

    def _update(self, stage: int) -> bool:
        updates = self._streams[stage].updates
        if self._num_updates[stage] == len(updates):
            return False
        added: list[list[_MicrobatchId]] = []
        for minibatch, copy in updates[self._num_updates[stage]]:
            count = len(self._cut[minibatch])
            parts = [_MicrobatchId(minibatch, number) for number in range(count)]
            added.append([part for part in parts if self._copy(stage, part) == copy])
        kept = self._gradients[stage]
        if any(part not in kept for own in added for part in own):
            return False
        self._stages[stage].apply_all([[kept.pop(part) for part in own] for own in added])
        self._num_updates[stage] += 1
        return True


def _alone(count: int) -> StaleStream:
    """The journal of a stage that has one copy and waits for nobody."""
    own = [Contribution(number, 0) for number in range(count)]
    return StaleStream([(gradient,) for gradient in own], {own[k]: k for k in range(count)})


def _total(terms: Sequence[Tensor | None]) -> Tensor:
    there = [term for term in terms if term is not None]
    total = there[0]
    for term in there[1:]:
        total = total + term
    return total
