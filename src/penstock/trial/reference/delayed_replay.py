"""The reference of an asynchronous plan: the same stream, one microbatch at a time.

One process goes through the microbatches in order, forward and backward through all stages, with
exactly the weights that ``penstock.versions`` says each pass reads. All versions of a stream are
kept, so nothing has to be timed: a weight of some updates ago is looked up in a list. No pipeline
code is shared, so that an equal result says something about the pipeline.

Each microbatch is one autograd graph over copies of the weights that are its own. A backward that
reads other weights than its forward finds them there, because they are written over the copies in
between; whatever else autograd saved stays as the forward left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.schedule.rounds import Rounds, warm_up
from penstock.core.summation.tree import SumTree
from penstock.core.versions import (
    DoubleBuffer,
    Flush,
    Latest,
    PipeMare,
    Place,
    Policy,
    Predict,
    VerticalSync,
    least_minibatch,
)
from penstock.engine.model.microbatches import Weight, Weighting
from penstock.engine.model.optimizer_factory import OptimizerFactory, SchedulerFactory
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import Skip, spine_of
from penstock.trial.reference.replayed_stage import ReplayedStage, Tensors
from penstock.trial.reference.single_device import check_cuts, cut_minibatch, run_where_it_draws


class WeightsRead(NamedTuple):
    """The versions that one microbatch read at one stage. All numbers count from 0 in each stream.

    Attributes:
        forward_version: the version of the weights that its forward read.
        backward_version: the version that its backward read.
        update: the update of the stage that applied its gradient; it makes version ``update + 1``.
    """

    stage: int
    microbatch: int
    forward_version: int
    backward_version: int
    update: int

    @property
    def delay(self) -> int:
        """Updates between the version that the forward read and the one that is updated."""
        return self.update - self.forward_version


class DelayedReplay:
    """Train a model with the weight versions of an asynchronous pipeline, without a pipeline.

    Args:
        model: as given to ``Pipeline``. Its parameters are always the newest weights.
        cuts: how many layers of the spine each stage has.
        versions: which weights each pass reads; ``penstock.versions`` names the papers.
        num_microbatches: per minibatch; fewer where a minibatch has fewer rows.
        loss: from (output, targets) of a microbatch to a scalar.
        optimizer: makes the optimizer of a stage; called once for each stage with parameters.
        replicas: copies of each stage, by default one. Where each microbatch is an update, the
            gradients of r replicas are averaged, and all learning rates of the stage are r times
            what the factory gave; if the loss is a sum, they are summed, and rates stay.
        trees: of the copies of each stage, in which their gradients are added; by default in the
            order of the copies.
        lr_scheduler: makes the scheduler of an optimizer; stepped after each update of its stage.
        clip_stage_norm: the most that the norm of one stage's gradients may be at an update.
        seed: seeds dropout; a pipeline with the same seed draws the same. Default: torch's.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its rows.
        weight: how many terms of the mean the targets of a microbatch hold; default: rows.

    Attributes:
        reads: what was read in the last stream, by microbatch and then by stage; PipeMare's
            synchronous minibatches are not part of it.

    Raises:
        InputError: cuts or replicas that do not fit the model or each other, or a policy that
            cannot foresee what this optimizer does.
        ModelError: the model has no spine, or two stages share a parameter.
    """

    def __init__(  # noqa: PLR0913 - a reference takes what the pipeline takes
        self,
        model: nn.Module,
        cuts: Sequence[int],
        versions: Policy,
        num_microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory,
        *,
        replicas: Sequence[int] | None = None,
        trees: Sequence[SumTree] | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        clip_stage_norm: float | None = None,
        seed: int | None = None,
        reduction: str = "mean",
        weight: Weight | None = None,
    ) -> None:
        layers = spine_of(model)
        counts = (1,) * len(cuts) if replicas is None else tuple(replicas)
        _check(versions, cuts, counts, len(layers), num_microbatches)
        self._policy = versions
        self._replicas = counts
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._loss_index = len(layers)
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._weighting = Weighting(reduction, weight)
        self._clip_stage_norm = clip_stage_norm
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stages = []
        orders = [SumTree.of(range(count)) for count in counts] if trees is None else trees
        for number, (first, end) in enumerate(pairwise(accumulate(cuts, initial=0))):
            stage = ReplayedStage(
                layers[first:end], first, self._place(number), orders[number], versions
            )
            stage.take_optimizer(names, optimizer, lr_scheduler, reduction == "mean")
            self._stages.append(stage)
        self._num_minibatches = 0
        self.reads: list[WeightsRead] = []

    def _place(self, stage: int) -> Place:
        by_microbatch = self._policy.updates == "microbatch"
        per_update = 1.0 if by_microbatch else self._num_microbatches / self._replicas[stage]
        return Place(stage, len(self._replicas), warm_up(self._replicas, stage), per_update)

    def train(self, batches: Iterable[tuple[Any, Any]]) -> list[Tensor]:
        """Train on one stream: microbatches and versions count from 0, and all updates are made.

        Optimizers, schedulers and corrections go on from the stream before.

        Args:
            batches: (inputs, targets) of each minibatch.

        Returns:
            The loss of each minibatch: the mean over its terms (or the sum), each microbatch with
            the weights that its forward read.
        """
        minibatches = [self._cut(inputs, targets) for inputs, targets in batches]
        at_first = self._policy.t3 if isinstance(self._policy, PipeMare) else 0
        synchronous = max(0, at_first - self._num_minibatches)
        losses = self._stream(minibatches[:synchronous], Flush())
        self.reads = []
        least = min(least_minibatch(self._policy, self._replicas), self._num_microbatches)
        stream: list[list[_Microbatch]] = []
        for index, minibatch in enumerate(minibatches[synchronous:], start=synchronous + 1):
            stream.append(minibatch)
            # Behind one that is too short for the versions that are kept, a pipeline drains.
            if len(minibatch) < least or index == len(minibatches):
                losses += self._stream(stream, self._policy)
                stream = []
        return losses

    def _cut(self, inputs: Any, targets: Any) -> list[_Microbatch]:
        cut = cut_minibatch(inputs, targets, self._num_microbatches, self._weighting)
        return [_Microbatch(number, *columns) for number, columns in enumerate(cut)]

    def _stream(self, minibatches: list[list[_Microbatch]], policy: Policy) -> list[Tensor]:
        account = _StreamVersions(policy, self._replicas, tuple(accumulate(map(len, minibatches))))
        for stage in self._stages:
            stage.begin()
        self.reads = []
        losses = []
        k = 0
        for minibatch in minibatches:
            total: Tensor | None = None
            for part in minibatch:
                term = self._microbatch(k, part, account)
                if term is not None:
                    total = term if total is None else total + term
                k += 1
            assert total is not None  # a minibatch without any terms is refused
            losses.append(total)
            self._num_minibatches += 1
        return losses

    def _microbatch(self, k: int, part: _Microbatch, account: _StreamVersions) -> Tensor | None:
        """Run forward, backward, and the updates that are then due; give its share of the loss."""
        reads = [account.read(number, k) for number in range(len(self._stages))]
        pairs = list(zip(self._stages, reads, strict=True))
        copies = [stage.copies(account.policy, read.forward_version) for stage, read in pairs]
        loss = self._forward(part, copies)
        # The mean of no terms is NaN, and NaN · 0 as well.
        term = loss * part.share if part.share else None
        if term is not None:
            for (stage, read), own in zip(pairs, copies, strict=True):
                now = stage.backward_weights(account.policy, read.backward_version)
                for name, leaf in own.items():
                    leaf.data.copy_(now[name])
            # Where each microbatch is an update, it is a minibatch of its own.
            graph = term if account.by_minibatch else loss
            graph.backward()  # type: ignore[no-untyped-call]
        averages = self._weighting.reduction == "mean" and not account.by_minibatch
        for number, (stage, own) in enumerate(zip(self._stages, copies, strict=True)):
            stage.gather(k, {name: leaf.grad for name, leaf in own.items()})
            if account.completes_round(number, k):
                stage.update(account.policy, averages, self._clip_stage_norm)
        self.reads += reads
        return None if term is None else term.detach()

    def _forward(self, part: _Microbatch, copies: list[Tensors]) -> Tensor:
        draw = partial(run_where_it_draws, self._streams, (self._num_minibatches, part.number))
        skips: dict[str, Skip] = {}
        value = part.inputs
        for stage, own in zip(self._stages, copies, strict=True):
            value = stage.run(own, value, skips, draw)
        loss: Tensor = draw(self._loss_index, True, partial(self._loss, value), part.targets)
        return loss


class _Microbatch(NamedTuple):
    """A microbatch: its number in the minibatch, its data, and its share of the loss."""

    number: int
    inputs: Any
    targets: Any
    share: float


class _StreamVersions:
    """Says which versions the passes of one stream read, and when its stages update."""

    def __init__(self, policy: Policy, replicas: tuple[int, ...], ends: tuple[int, ...]) -> None:
        self.policy = policy
        self.by_minibatch = policy.updates == "minibatch"
        self._replicas = replicas
        self._ends = ends
        self._rounds = Rounds(replicas, ends if self.by_minibatch else None)

    def read(self, stage: int, k: int) -> WeightsRead:
        """The versions that microbatch ``k`` reads at a stage."""
        round_ = self._rounds.of(stage, k)
        match self.policy:
            case Flush():
                forward = round_
            case VerticalSync():
                forward = max(0, round_ - (len(self._replicas) - 1))
            case DoubleBuffer():
                forward = max(0, round_ - 1)
            case _:
                forward = self._newest(stage, k)
        unstashed = isinstance(self.policy, Latest | PipeMare | Predict)
        return WeightsRead(stage, k, forward, round_ if unstashed else forward, round_)

    def _newest(self, stage: int, k: int) -> int:
        """How many updates a stage has made when the forward of microbatch ``k`` runs there.

        Its replica takes every r-th microbatch. Before its forward of the j-th of them, from 0, it
        ran the backwards of the first j − W, where W is its warm-up.
        """
        replicas = self._replicas[stage]
        done = max(0, k // replicas - warm_up(self._replicas, stage))
        if not self.by_minibatch:
            return done
        gone_back = range(k % replicas, k, replicas)[:done]
        minibatches = islice(pairwise((0, *self._ends)), self._rounds.of(stage, k))
        return sum(
            all(i in gone_back for i in range(start, end) if i % replicas == k % replicas)
            for start, end in minibatches
        )

    def completes_round(self, stage: int, k: int) -> bool:
        """Whether a stage updates after microbatch ``k``, as it always does at the stream's end."""
        return k + 1 == self._ends[-1] or self._rounds.of(stage, k) < self._rounds.of(stage, k + 1)


def _check(
    policy: object, cuts: Sequence[int], replicas: Sequence[int], num_layers: int, count: int
) -> None:
    if not isinstance(policy, Policy):
        raise InputError(f"versions is {policy!r}; give a policy, as in versions.Stash()")
    check_cuts(cuts, num_layers)
    if len(replicas) != len(cuts) or min(replicas) < 1:
        raise InputError(
            f"replicas are {list(replicas)}; give a count ≥ 1 for each of the {len(cuts)} stages"
        )
    if count < 1:
        raise InputError(f"num_microbatches is {count}, but must be ≥ 1")
