"""From gradients to weights, on one rank: sums of shared weights, unscaling, clipping, steps.

Three synchronous ways to update, all with the result of one device:

- Nothing global is asked for: each stage steps as soon as its gradients are complete.
- Ranks agree first: all tell their norms, wait for the others', clip or skip, then step.
- Post-validated: each stage steps at once, and its rank tells the norms; the verdict is read when
  the next minibatch is under way; where it was wrong to step, the step is undone and made again.

In an asynchronous pipeline, each stage steps at the end of each of its rounds, on its own.

Post-validation, which waits for nobody between gradients and steps (arXiv 2401.10241, section 4);
the numbers stand at the lines here, in ``worker``, ``forward`` and ``steps``:

1. A stage whose gradients are complete notes the norms of its parameters' gradients.
2. With its last stage, the rank tells all others its norms, before it steps.
3. It remembers weights, gradients and optimizer state, and steps: on trust.
4. The next minibatch begins with the new weights. Its first forwards work on copies of the inputs,
   and buffers are saved, since it may have to begin anew. If the user's code fails, that may be for
   weights that will not stand: a void goes on in place of the value, and the error is kept.
5. At the AGREE op, which stands where waiting costs least, the rank reads the others' norms. All
   ranks come to the same verdict from the same numbers.
6. The steps stand: what they remembered is dropped, and a kept error is raised after all.
7. They do not: they are undone, made as the verdict says, and the minibatch begins anew with
   messages of new numbers; those of the old attempt are discarded.

Where no minibatch follows, 5 to 7 happen at the end of this one.

Gradients of layers that a group shares: terms are summed, norms travel as squares of parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.versions import Place
from penstock.engine.model.optimizer_factory import (
    OptimizerFactory,
    Parameters,
    make_optimizer,
    make_scheduler,
    steps_alone,
)
from penstock.engine.reduce.agreement import Share, Verdict, hear, tell, unscale
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import MakeReducer, SharedWeights
from penstock.engine.reduce.sums import Sums
from penstock.engine.run.rank.undo import Undo
from penstock.engine.run.recipe import Recipe
from penstock.engine.tensor.channel_group import ChannelGroup
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.tags import FIRST_EXCHANGE


class Divided(Protocol):
    """What a stage says of its parameters."""

    @property
    def terms(self) -> Sequence[nn.Parameter]:
        """Those of which every member has a term of the gradient."""

    @property
    def parts(self) -> Sequence[nn.Parameter]:
        """Those of which every member has a part."""


class GroupGradients:
    """One member's part in completing its group's gradients, round after round.

    Args:
        group: with whom.
        holdings: what each stage says of its parameters.

    Attributes:
        group: as given.
    """

    def __init__(self, group: ChannelGroup, holdings: Mapping[int, Divided]) -> None:
        self.group = group
        self._terms = {stage: held.terms for stage, held in holdings.items()}
        self._parts = {id(part) for held in holdings.values() for part in held.parts}
        self._left: set[int] = set()

    def begin(self) -> None:
        """A round begins, in which every stage's gradients are made whole once."""
        self._left = {stage for stage, terms in self._terms.items() if terms}

    def complete(self, stage: int | None = None) -> None:
        """Sum the members' terms, one message for all gradients of a dtype.

        Args:
            stage: the one whose gradients are complete but for that; by default all.
        """
        due = sorted(self._left if stage is None else self._left & {stage})
        self._left -= {*due}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for index in due:
            for parameter in self._terms[index]:
                if parameter.grad is not None:
                    by_dtype[parameter.grad.dtype].append(parameter)
        for parameters in by_dtype.values():
            flat = torch.cat([_gradient(one).reshape(-1) for one in parameters])
            sizes = [one.numel() for one in parameters]
            pieces = torch.split(self.group.all_reduce(flat), sizes)
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def share(self, own: Share, parameters: Mapping[int, nn.Parameter]) -> Share:
        """What the group knows, of what one member does: norms of whole gradients.

        Args:
            own: norms of this member's gradients, by any key.
            parameters: whose gradients they are.
        """
        divided = [key for key in own.norms if id(parameters[key]) in self._parts]
        norms = dict(own.norms)
        if divided:
            squares = torch.stack([norms[key].double().square() for key in divided])
            whole = self.group.all_reduce(squares).sqrt()
            norms |= {
                key: norm.to(norms[key].dtype) for key, norm in zip(divided, whole, strict=True)
            }
        overflow = None if own.overflow is None else self.group.largest(own.overflow)
        return Share(norms, overflow)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@dataclass(frozen=True)
class Holding:
    """What one stage of a rank trains.

    Attributes:
        named: its parameters by their name in the model; a parameter that several stages of the
            rank use is in the first of them only.
        counted: those whose norm this rank tells, by their place in the model: of every weight,
            one of its holders does.
        place: where the stage stands in the pipeline.
        delay: how many updates old its gradients are when they are applied.
        rate: what its learning rates are multiplied by where gradients of replicas are averaged.
        damping: what they are multiplied by because its gradients are old.
        terms: parameters of which every member of the rank's group has a term of the gradient.
        parts: parameters of which every member has a part.
    """

    named: Mapping[str, nn.Parameter]
    counted: Mapping[int, nn.Parameter]
    place: Place = field(default_factory=lambda: Place(0, 1, 0))
    delay: float = 0.0
    rate: float = 1.0
    damping: float = 1.0
    terms: Sequence[nn.Parameter] = ()
    parts: Sequence[nn.Parameter] = ()


_NOTHING = Share({})


class Updater:
    """Applies the gradients of one rank's stages.

    Args:
        rank: the one whose stages these are.
        num_ranks: how many take part in an agreement.
        holdings: what each stage of the rank trains.
        transport: the rank's end of its channels.
        shared: weights of which this rank holds one of several copies.
        make_reducer: how their gradients are summed.
        group: with whom the rank shares its layers; ``None`` if with nobody.

    Attributes:
        sums: the sums of the gradients of ``shared``.
        shards: what this rank updates of weights of which each holder updates a part.
        holdings: as given.
        optimizers: by stage; a stage without parameters has none.
        schedulers: of the optimizers, by stage, if there are any.
        rates: what the learning rates of each stage were multiplied by when it was built.
        late: whether updates on which ranks agree come with the next minibatch.
        owed: of stages whose gradients have left memory before all ranks could agree on them, what
            they agreed on; the update comes when the stage does.
        num_updates: steps begun so far, over all stages.
        loss_scale: as of the last verdict.
        norm: that of all gradients at the last verdict, before clipping; ``None`` before any.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        holdings: Mapping[int, Holding],
        transport: Transport,
        recipe: Recipe,
        shared: Sequence[SharedWeights] = (),
        group: ChannelGroup | None = None,
        make_reducer: MakeReducer = OwnerReducer,
    ) -> None:
        self.num_updates = 0
        self.late = False
        self.owed: dict[int, Verdict] = {}
        self.loss_scale = recipe.loss_scale
        self.norm: Tensor | None = None
        # Where gradients of replicas are averaged, there are so many times fewer updates.
        self.rates = {
            stage: held.damping * (held.rate if recipe.averages else 1.0)
            for stage, held in holdings.items()
        }
        self.optimizers = {
            stage: made
            for stage, holding in holdings.items()
            if recipe.optimizer is not None and holding.named
            if (made := _optimizer(recipe.optimizer, stage, holding, self.rates[stage])) is not None
        }
        # One holder keeps gradients that are only gathered, or the next sum would count them twice.
        everywhere = recipe.optimizer is not None
        self.sums = Sums(rank, shared, transport, everywhere=everywhere, make=make_reducer)
        clips = recipe.needs_agreement or recipe.clip_stage_norm is not None
        self.shards = self.sums.shards(hands_sums_to_all=clips or not everywhere)
        for stage, optimizer in self.optimizers.items():
            self.shards.put_into(optimizer, f"stage {stage}")
        make = recipe.lr_scheduler
        self.schedulers = {
            stage: make_scheduler(make, optimizer, f"stage {stage}", takes_metric=not recipe.live)
            for stage, optimizer in self.optimizers.items()
            if make is not None
        }
        # The others wait for a metric, which the caller gives them between steps.
        self._stepping = {stage: one for stage, one in self.schedulers.items() if steps_alone(one)}
        self._rank = rank
        self._num_ranks = num_ranks
        self.holdings = holdings
        self._transport = transport
        self._recipe = recipe
        self._whole = None if group is None else GroupGradients(group, holdings)
        self._number = 0
        self._averages = False
        self._asynchronous = False
        self._to_update: set[int] = set()
        self._verdict: Verdict | None = None
        self._pending: tuple[int, Share, dict[int, Undo]] | None = None
        self._share = _NOTHING
        self._undo: dict[int, Undo] = {}

    @property
    def pending(self) -> bool:
        """Whether steps have been made that are not validated yet."""
        return self._pending is not None or bool(self._undo)

    def begin(self, number: int, *, asynchronous: bool = False) -> None:
        """Start a minibatch, or a stream of them if it is asynchronous; ``number`` tells its
        messages from those of others."""
        self._asynchronous = asynchronous
        if self._whole is not None:
            self._whole.group.begin(number)
        self._averages = (
            asynchronous and self._recipe.averages and self._recipe.updates == "microbatch"
        )
        self._begin_round(FIRST_EXCHANGE + number)

    def _begin_round(self, number: int) -> None:
        self._number = number
        self.sums.begin(number, averages=self._averages)
        if self._whole is not None:
            self._whole.begin()
        self._to_update = set(self.holdings)
        self._verdict = None
        self._share = _NOTHING
        self._undo = {}

    def of_members(self) -> set[Edge]:
        """The channels on which other members of the rank's group may wait for this one."""
        return set() if self._whole is None else self._whole.group.outgoing()

    def agree(self) -> None:
        """Wait for all ranks' norms, and make the gradients what the verdict says."""
        self._complete()
        share = self._of_group(Share.of(self._counted(), self._unscaled(self.holdings)))
        if self.late:  # of gradients that have left, the norms are noted
            share = self._share.with_that_of(share)
        tell(self._transport, self._rank, self._num_ranks, self._number, share)
        verdict = self._judge(self._number, share)
        if self.late:
            self.owed.update(dict.fromkeys(self.optimizers, verdict))

    def note(self, stage: int, leaving: Iterable[nn.Parameter]) -> None:
        """Note the norms of a stage's complete gradients, which leave memory.

        Args:
            leaving: the weights whose gradients leave.
        """
        own = {id(parameter) for parameter in leaving}
        held = self.holdings[stage]
        overflow = None
        if self.loss_scale is not None:
            gradients = [one.grad for one in held.named.values() if id(one) in own]
            given = [gradient for gradient in gradients if gradient is not None]
            overflow = unscale(given, self.loss_scale.inverse)
        counted = {place: one for place, one in held.counted.items() if id(one) in own}
        self._share = self._share.with_that_of(Share.of(counted, overflow))

    def update_late(self, stage: int) -> None:
        """Step one stage with the gradients of the minibatch before, as its verdict says."""
        verdict = self.owed.pop(stage)
        self.num_updates += 1
        self._step(stage, verdict)
        if stage in self._stepping:
            self._stepping[stage].step()
        # What has been made for good belongs to no step that may fail later.
        self.num_updates -= 1

    def _complete(self, stage: int | None = None) -> None:
        """Make gradients whole: of weights with several holders, and of a group's members."""
        self.sums.complete(stage)
        if self._whole is not None:
            self._whole.complete(stage)

    def _of_group(self, share: Share) -> Share:
        return share if self._whole is None else self._whole.share(share, self._counted())

    def _judge(self, number: int, share: Share) -> Verdict:
        shares = hear(self._transport, self._rank, self._num_ranks, number, share)
        # Whether steps that have been made stand is for the host to decide.
        reads_factor = self._recipe.post_validate
        verdict = Verdict.of(shares, self._recipe.clip_norm, reads_factor=reads_factor)
        self._verdict = verdict
        self.norm = verdict.norm
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(verdict.finite)
        return verdict

    def _counted(self) -> dict[int, nn.Parameter]:
        return {
            place: parameter
            for held in self.holdings.values()
            for place, parameter in held.counted.items()
        }

    def _unscaled(self, stages: Iterable[int]) -> Tensor | None:
        """Divide gradients by the loss scale; whether any of them was not finite, on their
        device."""
        if self.loss_scale is None:
            return None
        return unscale(self._gradients(stages), self.loss_scale.inverse)

    def _gradients(self, stages: Iterable[int]) -> list[Tensor]:
        return [
            parameter.grad
            for stage in stages
            for parameter in self.holdings[stage].named.values()
            if parameter.grad is not None
        ]

    def update(self, stage: int) -> None:
        """Step one stage whose gradients are complete."""
        self._to_update.discard(stage)
        if self._recipe.post_validate:
            self._step_on_trust(stage)
            return
        self._complete(stage)
        optimizer = self.optimizers.get(stage)
        learned = not self._recipe.skips_without_gradient or bool(self._gradients([stage]))
        if optimizer is not None and learned:
            self.num_updates += 1
            self._clip_stage(stage)
            self._step(stage, self._verdict)
        if self._recipe.optimizer is not None:
            self.sums.hand_back(stage)
        if not self._to_update:
            if learned:
                self._step_schedulers()
            if self._asynchronous:
                self._begin_round(self._number + 1)

    def step_alone(self, stage: int) -> None:
        """Step one stage, whatever others do, with what lies in the gradients of its rows."""
        if stage in self.optimizers:
            self.num_updates += 1
            self.optimizers[stage].step()
            self.shards.clear(self.holdings[stage].named.values())
        if stage in self._stepping:
            self._stepping[stage].step()

    def _step(self, stage: int, verdict: Verdict | None) -> None:
        optimizer = self.optimizers[stage]
        if verdict is None or verdict.finite:
            if verdict is not None and verdict.clips:
                for gradient in self._gradients([stage]):
                    gradient.mul_(verdict.factor)
            self.shards.lend()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.shards.clear(self.holdings[stage].named.values())

    def _clip_stage(self, stage: int) -> None:
        limit = self._recipe.clip_stage_norm
        if limit is None:
            return
        own = dict(enumerate(self.holdings[stage].named.values()))
        if self._whole is None:
            torch.nn.utils.clip_grad_norm_(own.values(), limit)
            return
        factor = Verdict.of([self._whole.share(Share.of(own), own)], limit).factor
        for gradient in self._gradients([stage]):
            gradient.mul_(factor)

    def _step_schedulers(self) -> None:
        for scheduler in self._stepping.values():
            scheduler.step()

    def _step_on_trust(self, stage: int) -> None:
        holding = self.holdings[stage]
        self.sums.complete(stage)
        overflow = self._unscaled([stage])
        # [1]
        self._share = self._share.with_that_of(Share.of(holding.counted, overflow))
        if not self._to_update:
            # [2] All else that this step does is this rank's own affair: let the others go on.
            tell(self._transport, self._rank, self._num_ranks, self._number, self._share)
        optimizer = self.optimizers.get(stage)
        if optimizer is not None:
            self.num_updates += 1
            # [3]
            self._undo[stage] = Undo(optimizer, holding.named.values())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not self._to_update:
            self._pending = self._number, self._share, self._undo
            self._undo = {}

    def settle(self) -> bool:
        """Read the verdict on the steps made on trust, if there are any.

        Returns:
            Whether they stand. If not, they have been undone and made as the verdict says, and
            whatever was computed with the wrong weights must be computed again.
        """
        if self._pending is None:
            return True
        number, share, steps = self._pending
        # [5]
        verdict = self._judge(number, share)
        stands = verdict.finite and not verdict.clips
        if not stands:  # [7]
            for stage, undo in steps.items():
                undo.take_back()
                self._step(stage, verdict)
        self._step_schedulers()
        self._pending = None
        return stands

    def drop_gradients(self) -> None:
        """Forget what a failed step has accumulated; not what a late update still waits for."""
        for stage, optimizer in self.optimizers.items():
            if stage not in self.owed:
                optimizer.zero_grad(set_to_none=True)
        self.shards.clear([*self.shards.of])


def _optimizer(
    make: OptimizerFactory, stage: int, holding: Holding, rate: float
) -> torch.optim.Optimizer | None:
    """A stage's optimizer, its learning rates times ``rate``; ``None`` if it has nothing to train
    and the function refuses that."""
    place = holding.place
    named = [*holding.named.items()]
    parameters = Parameters(named, place.stage, place.num_stages, holding.delay)
    try:
        made = make_optimizer(make, parameters, f"stage {stage}")
    except InputError:
        if not any(parameter.requires_grad for parameter in parameters):
            return None
        raise
    if rate != 1.0:
        for group in made.param_groups:
            group["lr"] = group["lr"] * rate
    return made
