"""From gradients to weights on one rank, whichever way it updates: whole gradients, numbers on
which all ranks agree, optimizers that step.

When each of this happens is for an update protocol to say (``protocols``, ``on_trust``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from penstock.engine.reduce.sharding import steps_by_parameter
from penstock.engine.reduce.sums import GradientSums
from penstock.engine.run.recipe import Recipe
from penstock.engine.tensor.group import ChannelGroup
from penstock.engine.transport import Edge, Transport


@dataclass(frozen=True)
class StageParameters:
    """The parameters that one stage of a rank trains, and how.

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


class GroupGradients:
    """One member's part in completing its group's gradients, round after round: terms are summed,
    norms travel as squares of parts.

    Args:
        group: with whom.
        holdings: what each stage says of its parameters.

    Attributes:
        group: as given.
    """

    def __init__(self, group: ChannelGroup, holdings: Mapping[int, StageParameters]) -> None:
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
        by_dtype: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for index in due:
            for parameter in self._terms[index]:
                if parameter.grad is not None:
                    by_dtype[parameter.grad.dtype].append((parameter, parameter.grad))
        for pairs in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs])
            sizes = [parameter.numel() for parameter, _ in pairs]
            sums = torch.split(self.group.all_reduce(flat), sizes)
            for (parameter, _), summed in zip(pairs, sums, strict=True):
                parameter.grad = summed.view_as(parameter)

    def share(self, own: Share, parameters: Mapping[int, nn.Parameter]) -> Share:
        """The group's share, from that of a member: norms of whole gradients.

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


class RankGradients:
    """The gradients of a rank's stages: who else has something of them, and what they amount to.

    Protocols ask for whole ones before they step, and for norms before ranks agree.

    Args:
        holdings: what each stage of the rank trains.
        sums: of weights of which other ranks hold copies.
        group: with whom the rank shares its layers; ``None`` if with nobody.

    Attributes:
        holdings, sums: as given.
    """

    def __init__(
        self,
        holdings: Mapping[int, StageParameters],
        sums: GradientSums,
        group: ChannelGroup | None,
    ) -> None:
        self.holdings = holdings
        self.sums = sums
        self._whole = None if group is None else GroupGradients(group, holdings)

    def begin(self, number: int) -> None:
        """A stream begins, whose messages have this number."""
        if self._whole is not None:
            self._whole.group.begin(number)

    def begin_round(self, number: int, *, averages: bool) -> None:
        """A round begins, in which every stage updates once; as ``GradientSums.begin``."""
        self.sums.begin(number, averages=averages)
        if self._whole is not None:
            self._whole.begin()

    def complete(self, stage: int | None = None) -> None:
        """Make gradients whole: of weights with several holders, and of a group's members."""
        self.sums.complete(stage)
        if self._whole is not None:
            self._whole.complete(stage)

    def of(self, stages: Iterable[int]) -> Iterator[Tensor]:
        """Those that there are."""
        for stage in stages:
            for parameter in self.holdings[stage].named.values():
                gradient = self.sums.rows_of(parameter).grad
                if gradient is not None:
                    yield gradient

    @property
    def has_members(self) -> bool:
        """Whether the rank shares its layers with other members of a group."""
        return self._whole is not None

    def has_any(self, stage: int) -> bool:
        """Whether anything has come back to a stage's parameters."""
        return next(self.of([stage]), None) is not None

    def share(self, overflow: Tensor | None) -> Share:
        """The share that the rank, or its group, has in an agreement.

        Args:
            overflow: what unscaling them told.
        """
        counted = {
            place: parameter
            for held in self.holdings.values()
            for place, parameter in held.counted.items()
        }
        in_rows = self.sums.norms_of_rows()
        own = Share.of(counted, overflow).with_that_of(
            Share({p: in_rows[whole] for p, whole in counted.items() if whole in in_rows})
        )
        return own if self._whole is None else self._whole.share(own, counted)

    def clip(self, stage: int, limit: float) -> None:
        """Make the norm of one stage's gradients ``limit`` at most."""
        own = dict(enumerate(self.holdings[stage].named.values()))
        in_rows = self.sums.norms_of_rows(stage)
        if self._whole is not None:
            share = self._whole.share(Share.of(own), own)
        elif in_rows:
            norms = {place: in_rows[whole] for place, whole in own.items() if whole in in_rows}
            share = Share.of(own).with_that_of(Share(norms))
        else:
            torch.nn.utils.clip_grad_norm_(own.values(), limit)
            return
        factor = Verdict.of([share], limit).factor
        for gradient in self.of([stage]):
            gradient.mul_(factor)

    def outgoing_to_members(self) -> set[Edge]:
        """The channels on which other members of the rank's group may wait for this one."""
        return set() if self._whole is None else self._whole.group.outgoing()


class Updater:
    """The optimizers of one rank's stages, and what ranks agree on before these step.

    It is built with the rank and lives as long; protocols tell it when to do what.

    Args:
        rank: the one whose stages these are.
        num_ranks: how many take part in an agreement.
        holdings: what each stage of the rank trains.
        transport: the rank's end of its channels.
        shared: weights of which this rank holds one of several copies.
        make_reducer: how their gradients are summed.
        group: with whom the rank shares its layers; ``None`` if with nobody.

    Attributes:
        recipe, holdings: as given.
        gradients: of the stages.
        sums: those of the gradients of ``shared``.
        shards: what this rank updates of weights of which each holder updates a part.
        optimizers: by stage; a stage without parameters has none.
        schedulers: of the optimizers, by stage, if there are any.
        rates: what the learning rates of each stage were multiplied by when it was built.
        deferred: of stages whose gradients have left memory before all ranks could agree on them,
            what they agreed on; the update comes when the stage does.
        num_updates: steps begun so far, over all stages.
        loss_scale: as of the last verdict.
        norm: that of all gradients at the last verdict, before clipping; ``None`` before any.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        holdings: Mapping[int, StageParameters],
        transport: Transport,
        recipe: Recipe,
        shared: Sequence[SharedWeights] = (),
        group: ChannelGroup | None = None,
        make_reducer: MakeReducer = OwnerReducer,
    ) -> None:
        self.recipe = recipe
        self.holdings = holdings
        self.num_updates = 0
        self.deferred: dict[int, Verdict] = {}
        self.loss_scale = recipe.loss_scale
        self.norm: Tensor | None = None
        # Where gradients of replicas are averaged, there are so many times fewer updates.
        self.rates = {
            stage: held.damping * (held.rate if recipe.averages else 1.0)
            for stage, held in holdings.items()
        }
        self.optimizers = _optimizers(recipe.optimizer, holdings, self.rates)
        # One holder keeps gradients that are only gathered, or the next sum would count them twice.
        everywhere = recipe.optimizer is not None
        self.sums = GradientSums(rank, shared, transport, everywhere=everywhere, make=make_reducer)
        self.gradients = RankGradients(holdings, self.sums, group)
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
        self._stepping = {stage: own for stage, own in self.schedulers.items() if steps_alone(own)}
        self._transport = transport
        self._seats = rank, num_ranks

    def unscale(self, gradients: Iterable[Tensor]) -> Tensor | None:
        """Divide gradients by the loss scale; whether any of them was not finite, on their
        device."""
        if self.loss_scale is None:
            return None
        return unscale(gradients, self.loss_scale.inverse)

    def tell(self, number: int, share: Share) -> None:
        """Send all ranks what this one knows of its gradients in a round."""
        tell(self._transport, *self._seats, number, share)

    def judge(self, number: int, share: Share) -> Verdict:
        """Wait for what all ranks know in a round, and say what follows."""
        shares = hear(self._transport, *self._seats, number, share)
        # Whether steps that have been made stand is for the host to decide.
        reads_factor = self.recipe.post_validate
        verdict = Verdict.of(shares, self.recipe.clip_norm, reads_factor=reads_factor)
        self.norm = verdict.norm
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(verdict.finite)
        return verdict

    def clip(self, stage: int) -> None:
        """Clip a stage's gradients by their own norm, where the recipe says so."""
        if self.recipe.clip_stage_norm is not None:
            self.gradients.clip(stage, self.recipe.clip_stage_norm)

    def step(self, stage: int, verdict: Verdict | None) -> None:
        """Let a stage's optimizer step, as a verdict says if there is one, and clear gradients."""
        optimizer = self.optimizers[stage]
        if verdict is None or verdict.finite:
            if verdict is not None and verdict.clips:
                for gradient in self.gradients.of([stage]):
                    gradient.mul_(verdict.factor)
            self.shards.lend()
            optimizer.step()
        self._clear(stage)

    def steps_in_turn(self, stage: int) -> bool:
        """Whether a stage may be stepped bucket by bucket: on a parameter server, with an optimizer
        that needs no gradients but a parameter's own, where nobody clips or shares layers."""
        if not self.sums.has_any:
            return False
        recipe = self.recipe
        waits = recipe.needs_agreement or recipe.clip_stage_norm is not None
        return (
            not waits
            and not recipe.skips_without_gradient
            and not self.gradients.has_members
            and stage in self.optimizers
            and steps_by_parameter(self.optimizers[stage])
            and self.sums.serves(stage)
        )

    def step_in_turn(self, stage: int) -> None:
        """Step a stage, and answer, bucket by bucket."""
        self.sums.update_in_turn(stage, self.optimizers[stage].step)

    def step_as_it_is(self, stage: int) -> None:
        """Let a stage's optimizer step on the gradients that there are."""
        self.optimizers[stage].step()
        clear_gradients(self.optimizers[stage])

    def step_alone(self, stage: int) -> None:
        """Step one stage, whatever others do, with what lies in the gradients of its rows."""
        if stage in self.optimizers:
            self.num_updates += 1
            self.optimizers[stage].step()
            self.shards.clear(self.holdings[stage].named.values())
        self.step_scheduler(stage)

    def step_scheduler(self, stage: int) -> None:
        """Step a stage's scheduler, if that waits for no metric."""
        if stage in self._stepping:
            self._stepping[stage].step()

    def step_schedulers(self) -> None:
        """Step all of them."""
        for scheduler in self._stepping.values():
            scheduler.step()

    def _clear(self, stage: int) -> None:
        clear_gradients(self.optimizers[stage])
        self.shards.clear(self.holdings[stage].named.values())

    def drop_gradients(self) -> None:
        """Forget what a failed step has accumulated; not what a deferred update waits for."""
        for stage, optimizer in self.optimizers.items():
            if stage not in self.deferred:
                clear_gradients(optimizer)
        self.shards.clear([*self.shards.of])
        self.sums.drop()


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let go the gradients of an optimizer's parameters."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    # As torch's own does, which tells a profiler and a compiler, for as long as a layer takes.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _optimizers(
    make: OptimizerFactory | None,
    holdings: Mapping[int, StageParameters],
    rates: Mapping[int, float],
) -> dict[int, torch.optim.Optimizer]:
    """By stage, of those that have something to train; learning rates are multiplied by ``rates``.

    A function may refuse to make one where nothing is trained.
    """
    optimizers = {}
    for stage, holding in holdings.items():
        if make is None or not holding.named:
            continue
        place = holding.place
        named = [*holding.named.items()]
        parameters = Parameters(named, place.stage, place.num_stages, holding.delay)
        try:
            made = make_optimizer(make, parameters, f"stage {stage}")
        except InputError:
            if any(parameter.requires_grad for parameter in parameters):
                raise
            continue
        if rates[stage] != 1.0:
            for group in made.param_groups:
                group["lr"] = group["lr"] * rates[stage]
        optimizers[stage] = made
    return optimizers
