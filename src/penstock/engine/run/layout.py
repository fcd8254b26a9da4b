"""Which rank holds what of a model: stages, weights with several holders, skips that cross stages.

Under threads, ranks that hold the same weights (tied ones, or a stage with copies) each need memory
of their own for them: their gradients are made at the same time. The first holder has the model's
own parameters, the others copies, which are kept equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.experts.dispatch import ExpertCopies
from penstock.engine.experts.divided import check_untied, divisible
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import NamedLayer
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.run.copies import ModuleCopies
from penstock.engine.run.materialising import Wholes, place_buffers, place_parameters
from penstock.engine.run.members import MemberCopies, Sharings, divided
from penstock.engine.run.rank.program import SkipRoute, skip_routes
from penstock.engine.run.rank.updater import StageParameters
from penstock.engine.run.replicas import ModelWeights, Replicas, SharedState, Weight
from penstock.engine.stage.slices import check_sliceable
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.group import ChannelGroup
from penstock.engine.weights.sharded_layers import Copies
from penstock.engine.weights.store import WeightStore
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import (
    all_group_sizes,
    ranks_holding,
    server_ranks,
    stages_held,
)


class Layout:
    """A model laid out as a plan says.

    Args:
        model: the module that is spread.
        layers: its spine.
        streams: where layers draw random numbers.
        one_process: whether all ranks share this process.
        devices: of the members of ranks of this process, by the numbers of their seats.

    Attributes:
        sharings: how groups share layers; ``None`` where every rank is one device.
        server_ranks: the ranks that are parameter servers.
        weights: which ranks and stages use each parameter.

    Raises:
        ModelError: something in the model cannot be spread as planned.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        layers: Sequence[NamedLayer],
        streams: LayerStreams,
        *,
        one_process: bool,
        devices: Mapping[int, torch.device],
    ) -> None:
        sizes = [len(stage.layers) for stage in plan.stages]
        self._first_layers = [*itertools.accumulate(sizes, initial=0)]
        borders = itertools.pairwise(self._first_layers)
        self._layers_of = [tuple(layers[start:stop]) for start, stop in borders]
        self._plan = plan
        self._schedule = plan.placement
        if self.num_slices > 1:
            check_sliceable(layers)
        self._streams = streams
        self._one_process = one_process
        self._devices = devices
        self.server_ranks = server_ranks(plan)
        self._first_seats = [*itertools.accumulate(all_group_sizes(plan), initial=0)]
        grouped = plan.num_tensor_ranks > 1
        self.sharings = Sharings(tuple(layers), plan) if grouped else None
        self._holders = Replicas(self._layers_of, partial(ranks_holding, plan))
        self.weights = ModelWeights(
            model,
            self._layers_of,
            self._holders,
            {server: stages_held(plan, server) for server in self.server_ranks},
            () if self.sharings is None else self.sharings.terms,
            self._expert_weights(),
        )
        self._holders.check_statistics(layers, plan.schedule)
        if plan.versions.asynchronous or plan.summing.stale:
            self.weights.check_untied()
        self._check_hooks()
        self._copies: dict[tuple[int, int], ModuleCopies] = {}

    def _expert_weights(self) -> set[int]:
        """The ids of the weights of experts that copies of their stage divide."""
        weights = {
            id(weight)
            for stage, planned in enumerate(self._plan.stages)
            if planned.expert_ranks > 1
            for mixture in divisible(self._layers_of[stage], planned.expert_ranks, stage)
            for weight in mixture.module.parameters()
        }
        if weights:
            check_untied([layer for own in self._layers_of for layer in own], weights)
        return weights

    def _check_hooks(self) -> None:
        in_parts = self.sharings is not None
        self.weights.check_hooks(in_parts=in_parts, num_slices=self.num_slices)

    def seats_of(self, rank: int) -> range:
        """The numbers of the seats of a rank: one for each member of its group."""
        return range(self._first_seats[rank], self._first_seats[rank + 1])

    def _device(self, rank: int, coordinate: int = 0) -> torch.device:
        """That of a member of a rank of this process."""
        return self._devices[self._first_seats[rank] + coordinate]

    @property
    def modules(self) -> Iterator[nn.Module]:
        """All modules of all layers."""
        return itertools.chain.from_iterable(layer.modules() for layer in self.layers)

    @property
    def layers(self) -> Iterator[nn.Module]:
        """The model's own layers, of all stages."""
        layers = itertools.chain.from_iterable(self._layers_of)
        return (layer.module for layer in layers)

    @property
    def keys(self) -> set[str]:
        """Of all stages' parameters and buffers, as the unsplit model names them."""
        return {key for stage in range(len(self._layers_of)) for key in self.own_state(stage)}

    @property
    def num_ranks(self) -> int:
        """How many ranks the model is spread over, and parameter servers."""
        return self._plan.num_ranks + len(self.server_ranks)

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into."""
        return self._schedule.num_slices

    @cached_property
    def skips(self) -> tuple[SkipRoute, ...]:
        """The skips that cross from one stage to another."""
        return skip_routes(self._layers_of)

    @cached_property
    def neighbours(self) -> frozenset[tuple[int, int]]:
        """The pairs of seats, the lower one first, that exchange tensors with every minibatch:
        outputs and gradients, skips, sums of shared weights, parts of values within groups."""
        ranks_of = self._schedule.ranks_of
        chain = [(stage, stage + 1) for stage in range(self._schedule.num_stages - 1)]
        skips = [(route.source, route.target) for route in self.skips]
        pairs = [
            pair
            for source, target in [*chain, *skips]
            for pair in itertools.product(ranks_of(source), ranks_of(target))
        ]
        for weight in self.weights:
            pairs += itertools.combinations(weight.ranks, 2)
        apart = {pair for pair in pairs if pair[0] != pair[1]}
        together = [pair for ranks in apart for pair in self._exchanging(*ranks)]
        for rank in range(self.num_ranks):
            together += itertools.combinations(self.seats_of(rank), 2)
        return frozenset((min(pair), max(pair)) for pair in together)

    def _exchanging(self, rank: int, other: int) -> Iterable[tuple[int, int]]:
        """The seats of two ranks that exchange what these do: those of equal coordinate, or all
        where groups have different sizes."""
        ours, theirs = self.seats_of(rank), self.seats_of(other)
        if len(ours) == len(theirs):
            return zip(ours, theirs, strict=True)
        return itertools.product(ours, theirs)

    def stages(
        self, rank: int, group: ChannelGroup | None = None, wholes: Wholes | None = None
    ) -> dict[int, Stage]:
        """The stages of a rank, with copies where others hold the model's own parameters.

        Args:
            group: of the member whose stages they are, where a group performs the rank's ops.
            wholes: what the model's own parameters are for while stages are built, if for no
                longer.
        """
        copies = self._copies_of(rank, group, wholes)
        return {
            stage: self._stage(stage, rank, group, copies)
            for stage in stages_held(self._plan, rank)
        }

    def _stage(
        self, stage: int, rank: int, group: ChannelGroup | None, copies: ModuleCopies
    ) -> Stage:
        layers = [self._own(layer, rank, copies) for layer in self._layers_of[stage]]
        shared = None
        if self.sharings is not None:
            shared = self.sharings.shared_output(stage, layers[-1].module, group)
        keeps_newest = self._plan.versions.activations == "newest"
        return Stage(
            stage,
            layers,
            self._first_layers[stage],
            self._streams,
            self._plan.stages[stage].recompute == "layers",
            self.num_slices,
            self._plan.place(stage).warm_up if keeps_newest else None,
            shared,
        )

    def layers_of(self, rank: int) -> dict[int, NamedLayer]:
        """The model's layers that a rank has weights of, by their numbers."""
        return {
            number: layer
            for stage in stages_held(self._plan, rank)
            for number, layer in enumerate(self._layers_of[stage], start=self._first_layers[stage])
        }

    def own_state(self, stage: int) -> dict[str, Tensor]:
        """The model's own state of a stage, under its keys."""
        return {
            layer.key(key): value
            for layer in self._layers_of[stage]
            for key, value in layer.module.state_dict().items()
        }

    def _copies_of(
        self, rank: int, group: ChannelGroup | None, wholes: Wholes | None
    ) -> ModuleCopies:
        """This rank's copies of what another one has the model's own of."""
        coordinate, foreign = 0 if group is None else group.index, []
        if self._one_process:
            holders = ((weight.parameter, weight.ranks) for weight in self.weights)
            first = 0 if coordinate else 1
            foreign = [parameter for parameter, ranks in holders if rank in ranks[first:]]
        device = self._device(rank, coordinate)
        copies = ModuleCopies(foreign, device)
        if group is not None and self.sharings is not None:
            owned = [
                weight.parameter
                for weight in self.weights
                if not self._one_process or rank == weight.ranks[0]
            ]
            has_buffers = not coordinate or not self._one_process
            copies = MemberCopies(foreign, self.sharings, group, device, owned, has_buffers, wholes)
        self._copies[rank, coordinate] = copies
        return copies

    def place(self, rank: int, stages: Mapping[int, Stage], coordinate: int = 0) -> None:
        """Move what a rank, or a member of it, has of the model to its device. What members have
        parts of stays where it is, since none has room for the whole of it."""
        device = self._device(rank, coordinate)
        for stage in stages.values():
            for layer in stage.layers:
                place_parameters(layer.module, device)
        if not coordinate or not self._one_process:
            divided = self._copies[rank, coordinate].divided
            place_buffers(self._modules_with_buffers_of(rank, stages), device, divided)

    def _modules_with_buffers_of(
        self, rank: int, stages: Mapping[int, Stage]
    ) -> Iterator[nn.Module]:
        """The model's own modules whose buffers live where a rank computes: those that no rank
        before it runs. If the rank runs a copy, since it shares a parameter, what its forwards
        write must still become the model's."""
        for index in stages:
            for layer in self._layers_of[index]:
                for module in layer.module.modules():
                    first_rank, _ = min(self._holders.of(module))
                    if first_rank == rank or not self._one_process:
                        yield module

    def place_copies(self, rank: int, coordinate: int = 0) -> None:
        """Give a rank's copies buffers on its device, once those of the model are on theirs."""
        copies = self._copies[rank, coordinate]
        copies.share()
        copies.let_go()  # that the originals were moved is nothing to follow

    def _own(self, layer: NamedLayer, rank: int, copies: ModuleCopies) -> NamedLayer:
        alone = not self._one_process or self._holders.runs_first(layer.module, rank)
        if alone and not isinstance(copies, MemberCopies):
            return layer
        return layer._replace(module=copies.of(layer))

    def holdings(self, rank: int, stages: dict[int, Stage]) -> dict[int, StageParameters]:
        """The parameters that each stage of a rank trains."""
        own = self._parameters(stages)
        holdings: dict[int, StageParameters] = {}
        for stage in stages:
            first = [
                weight for weight in self.weights if min(weight.stages(rank), default=None) == stage
            ]
            plan, place = self._plan, self._plan.place(stage)
            by_microbatch = plan.versions.asynchronous and plan.versions.updates == "microbatch"
            holdings[stage] = StageParameters(
                {weight.name: own[weight.place] for weight in first},
                {weight.place: own[weight.place] for weight in first if weight.ranks[0] == rank},
                place,
                plan.versions.delay(place),
                plan.replicas[stage] if by_microbatch else 1.0,
                plan.versions.damping(place),
                *divided(
                    self.sharings,
                    [(weight.parameter, own[weight.place]) for weight in first],
                    whole={id(weight.parameter) for weight in first if self._has_stand_ins(weight)},
                ),
            )
        return holdings

    def stores(
        self, stages: dict[int, Stage], optimizers: Mapping[int, torch.optim.Optimizer]
    ) -> dict[int, WeightStore]:
        """Where the versions of a rank's weights are kept, if there are several."""
        plan = self._plan
        if not plan.versions.asynchronous or plan.versions.activations == "newest":
            return {}  # forwards and backwards read what is there
        return {
            index: WeightStore(
                [module for layer in stage.layers for module in layer.module.modules()],
                plan.versions,
                plan.place(index),
                plan.replicas,
                optimizers.get(index),
            )
            for index, stage in stages.items()
        }

    @property
    def holders(self) -> list[list[tuple[int, ...]]]:
        """The seats that hold each group of shared weights, by its tag and by coordinate: members
        of equal coordinate sum what they have.

        Raises:
            ModelError: groups of different sizes hold one, and the plan's reducer is not the
                transport's.
        """
        if self._plan.summing.reducer in {"servers", "all-reduce"}:
            for first, *_ in self.weights.groups:
                if self._has_stand_ins(first):
                    raise ModelError(
                        f"{first.name!r} is tied between stages of different numbers of tensor "
                        f"ranks, whose sums {self._plan.summing.reducer!r} can't make; take the "
                        "reducer 'owners'"
                    )
        # Where sizes differ, members sum whole values by the transport, which needs no list.
        return [
            [*zip(*map(self.seats_of, first.ranks), strict=False)]
            for first, *_ in self.weights.groups
        ]

    def shared(
        self, rank: int, stages: dict[int, Stage], group: ChannelGroup | None = None
    ) -> list[SharedWeights]:
        """The weights of a rank that others hold, too; those with the same users together.

        Args:
            group: of the member whose stages they are, where a group performs the rank's ops.
        """
        own = self._parameters(stages)
        shared: list[SharedWeights] = []
        for index, weights in enumerate(self.weights.groups):
            first = weights[0]
            if rank not in first.ranks:
                continue
            parameters = tuple(own[weight.place] for weight in weights)
            stand_ins = None
            if self.sharings is not None and self._has_stand_ins(first):
                originals = [weight.parameter for weight in weights]
                stand_ins = self.sharings.stand_ins(originals, parameters, group)
                parameters = stand_ins.parameters
            of_one_stage = len({stage for _, stage in first.users}) == 1
            shared.append(
                SharedWeights(
                    index,
                    first.ranks,
                    first.stages(rank),
                    parameters,
                    of_one_stage and not self.weights.has_terms(first),
                    stand_ins,
                )
            )
        return shared

    def _has_stand_ins(self, weight: Weight) -> bool:
        """Whether groups of different sizes hold a weight."""
        return len({len(self.seats_of(rank)) for rank in weight.ranks}) > 1

    def shard(self, stages: Mapping[int, Stage], copies: Mapping[int, Copies]) -> None:
        """Let stages of a rank keep rows of their weights, of which other copies have the rest.

        Args:
            stages: the rank's.
            copies: those of each stage that has some.

        Raises:
            ModelError: a layer cannot be sharded.
        """
        plan = self._plan
        frees_with = plan.num_microbatches if plan.summing.gathered_for == "use" else None
        for index, those in copies.items():
            with self._replacing(stages[index]):
                stages[index].shard(those, frees_with=frees_with)

    def divide_experts(
        self, stages: Mapping[int, Stage], copies: Mapping[int, tuple[ExpertCopies, ExpertCopies]]
    ) -> None:
        """Let stages of a rank keep some of their experts, of which other copies have the rest.

        Args:
            stages: the rank's.
            copies: of each stage that has such: those that together have all, and all copies.
        """
        for index, (those, everyone) in copies.items():
            with self._replacing(stages[index]):
                stages[index].divide_experts(those, everyone)

    @contextmanager
    def _replacing(self, stage: Stage) -> Iterator[None]:
        """Within, the layers of a stage get other parameters, of which this must know."""
        modules = [layer.module for layer in stage.layers]
        before = [own for module in modules for own in module.parameters()]
        yield
        after = [own for module in modules for own in module.parameters()]
        self.weights.sharded(dict(zip(map(id, before), after, strict=True)))

    def shared_state(self, stages: dict[int, Stage]) -> SharedState:
        """The tensors that no forward of a rank's stages may write: others hold them, too."""
        return SharedState(
            {
                index: [
                    tensor
                    for original, layer in zip(self._layers_of[index], stage.layers, strict=True)
                    for tensor in self._holders.shared_tensors(original, layer.module)
                    # What is gathered anew for each step is nothing to write to, whoever has it.
                    if stage.sharded is None or tensor.is_buffer
                ]
                for index, stage in stages.items()
            }
        )

    def _parameters(self, stages: dict[int, Stage]) -> dict[int, nn.Parameter]:
        """By place in the model, the parameters that these stages compute with."""
        by_original = {id(weight.parameter): weight.place for weight in self.weights}
        parameters: dict[int, nn.Parameter] = {}
        for stage, built in stages.items():
            for original, layer in zip(self._layers_of[stage], built.layers, strict=True):
                pairs = zip(original.module.parameters(), layer.module.parameters(), strict=True)
                parameters.update({by_original[id(theirs)]: ours for theirs, ours in pairs})
        return parameters

    @property
    def copies(self) -> Iterable[nn.Module]:
        """Copied modules, which are not part of the user's model."""
        return (module for copies in self._copies.values() for module in copies.modules)

    def follow(self) -> None:
        """Let ranks follow what has happened to the model since the last step.

        Raises:
            ModelError: what has happened to it cannot be spread as planned.
        """
        self._check_hooks()
        for copies in self._copies.values():
            copies.follow()

    def let_go(self) -> None:
        """The caller may change the model from now on."""
        for copies in self._copies.values():
            copies.let_go()
