"""Which rank holds what of a model: stages, weights with several holders, skips that cross stages.

Under threads, ranks that hold the same weights (tied ones, or a stage with copies) each need memory
of their own for them: their gradients are made at the same time. The first holder has the model's
own parameters, the others twins, which are kept equal.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.randomness import LayerStreams
from penstock.model.spine import NamedLayer
from penstock.plans import Plan
from penstock.plans.serving import all_group_sizes, ranks_holding, server_ranks, stages_held
from penstock.reduce.reducer import SharedWeights
from penstock.run.holders import Holders
from penstock.run.members import MemberTwins, Sharings, divided
from penstock.run.placing import place_buffers, place_parameters
from penstock.run.rank.program import SkipRoute
from penstock.run.rank.updater import Holding
from penstock.run.shared_state import SharedState
from penstock.run.twins import Twins
from penstock.run.wholes import Wholes
from penstock.stage.slices import check_sliceable
from penstock.stage.stage import Stage
from penstock.tensor.channel_group import ChannelGroup
from penstock.weights.store import WeightStore


class _Weight(NamedTuple):
    """A parameter of the model and who uses it.

    Attributes:
        place: in the order of ``model.parameters()``.
        name: in the model.
        parameter: the model's own.
        users: (rank, stage), ascending.
    """

    place: int
    name: str
    parameter: nn.Parameter
    users: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a copy."""
        return tuple(sorted({rank for rank, _ in self.users}))

    def stages(self, rank: int) -> frozenset[int]:
        """Which stages of a rank use it."""
        return frozenset(stage for user, stage in self.users if user == rank)


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
        borders = itertools.pairwise(itertools.accumulate(sizes, initial=0))
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
        self._holders = Holders(self._layers_of, partial(ranks_holding, plan))
        self._weights = self._find_weights(model)
        self._check_buffers()
        if plan.versions.asynchronous or plan.summing.stale:
            self._check_untied()
        self._check_hooks()
        self._twins: dict[tuple[int, int], Twins] = {}

    def _find_weights(self, model: nn.Module) -> list[_Weight]:
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        named: dict[nn.Parameter, str] = {}
        for layer in itertools.chain.from_iterable(self._layers_of):
            for key, parameter in layer.module.named_parameters():
                named.setdefault(parameter, layer.key(key))
        return [
            _Weight(places[id(parameter)], name, parameter, self._users_of(parameter))
            for parameter, name in named.items()
        ]

    def _users_of(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        """(rank, stage), ascending. Parameter servers update no weights of several stages, each of
        which has an optimizer, and none of whose gradients members of a group have terms: these
        are whole when copies have summed them."""
        users = sorted(self._holders.of(parameter))
        has_terms = self.sharings is not None and id(parameter) in self.sharings.terms
        if has_terms or len({stage for _, stage in users}) > 1:
            users = [user for user in users if user[0] not in self.server_ranks]
        return tuple(users)

    def _check_buffers(self) -> None:
        """Ranks that run the same module see different values, so statistics would drift apart."""
        for layer in itertools.chain.from_iterable(self._layers_of):
            for module in layer.module.modules():
                ranks = sorted({rank for rank, _ in self._holders.of(module)})
                if len(ranks) > 1 and getattr(module, "track_running_stats", False):
                    raise ModelError(
                        f"{self._plan.schedule} runs {layer.name!r} ({type(module).__name__}) "
                        f"on ranks {ranks}, each of which would gather statistics of its own; "
                        "choose a schedule or cuts that leave it on one rank, or a norm without "
                        "running statistics"
                    )

    def _check_untied(self) -> None:
        """Gradients of one weight from several stages would be of different ages."""
        for weight in self._weights:
            stages = sorted({stage for _, stage in weight.users})
            if len(stages) > 1:
                raise ModelError(
                    f"{weight.name!r} is tied between stages {', '.join(map(str, stages))}, whose "
                    "gradients are of different ages without a flush; put the layers that share it "
                    "into one stage, untie them, or choose a synchronous schedule"
                )

    def _check_hooks(self) -> None:
        """Hooks on parameters see what a backward brings, which must be what it is on one device:
        the gradient of a whole microbatch."""
        for weight in self._weights:
            accumulated = weight.parameter._post_accumulate_grad_hooks
            if not accumulated and not weight.parameter._backward_hooks:
                continue
            stages = sorted({stage for _, stage in weight.users})
            if self.sharings is not None:
                sees = "tensor ranks each have a part of it"
            elif len(stages) > 1:
                sees = f"stages {', '.join(map(str, stages))} each have a part of the gradient"
            elif self.num_slices > 1:
                sees = "slices of a microbatch each have a part of the gradient"
            elif len(weight.ranks) > 1 and accumulated:
                sees = f"ranks {', '.join(map(str, weight.ranks))} each accumulate a part of it"
            else:
                continue
            raise ModelError(
                f"{weight.name!r} has hooks, which would not see what they see on one device: "
                f"{sees}; change the gradient in the optimizer instead (register_step_pre_hook), "
                "or choose a schedule or cuts that leave the parameter in one stage on one rank"
            )

    @cached_property
    def shared_stages(self) -> frozenset[int]:
        """Stages that share weights with a stage on another rank."""
        return frozenset(
            stage for weight in self._weights if len(weight.ranks) > 1 for _, stage in weight.users
        )

    @cached_property
    def first_stages(self) -> dict[str, int]:
        """By the name of each parameter, the first of the stages that use it."""
        return {weight.name: min(stage for _, stage in weight.users) for weight in self._weights}

    @property
    def withheld(self) -> tuple[str, ...]:
        """Names of the weights of stages that parameter servers update which no server has."""
        held = {stage for server in self.server_ranks for stage in stages_held(self._plan, server)}
        return tuple(
            weight.name
            for weight in self._weights
            if held & {stage for _, stage in weight.users}
            and not {*weight.ranks} & {*self.server_ranks}
        )

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """Names of the weights that several stages use."""
        return tuple(weight.name for weight in self._tied)

    @cached_property
    def tied_ids(self) -> frozenset[int]:
        """The identities of these weights."""
        return frozenset(id(weight.parameter) for weight in self._tied)

    @property
    def _tied(self) -> list[_Weight]:
        return [weight for weight in self._weights if len({stage for _, stage in weight.users}) > 1]

    def seats_of(self, rank: int) -> range:
        """The numbers of the seats of a rank: one for each member of its group."""
        return range(self._first_seats[rank], self._first_seats[rank + 1])

    def _device(self, rank: int, coordinate: int = 0) -> torch.device:
        """That of a member of a rank of this process."""
        return self._devices[self._first_seats[rank] + coordinate]

    @property
    def modules(self) -> Iterator[nn.Module]:
        """All modules of all layers."""
        layers = itertools.chain.from_iterable(self._layers_of)
        return itertools.chain.from_iterable(layer.module.modules() for layer in layers)

    @property
    def keys(self) -> set[str]:
        """Of all stages' parameters and buffers, as the unsplit model names them."""
        layers = itertools.chain.from_iterable(self._layers_of)
        return {layer.key(key) for layer in layers for key in layer.module.state_dict()}

    @property
    def num_ranks(self) -> int:
        """How many ranks the model is spread over, and parameter servers."""
        return self._plan.num_ranks + len(self.server_ranks)

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a minibatch with enough rows has."""
        return self._plan.num_microbatches

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into."""
        return self._schedule.num_slices

    @cached_property
    def has_copies(self) -> bool:
        """Whether a stage is on several ranks, each with microbatches of its own."""
        return self._schedule.weight_copies > 1

    @cached_property
    def updating_tied_weights(self) -> frozenset[int]:
        """The stages that update a weight which other stages of their rank use as well: not before
        all of the rank's gradients of it are complete."""
        return frozenset(
            min(weight.stages(rank))
            for weight in self._tied
            for rank in weight.ranks
            if len(weight.stages(rank)) > 1
        )

    @cached_property
    def skips(self) -> tuple[SkipRoute, ...]:
        """The skips that cross from one stage to another."""
        source: dict[str, int] = {}
        routes: list[SkipRoute] = []
        for stage, layers in enumerate(self._layers_of):
            for layer in layers:
                for key in layer.recalls:
                    if source[key] != stage:
                        routes.append(SkipRoute(key, source[key], stage, len(routes)))
                source.update(dict.fromkeys(layer.stashes, stage))
        return tuple(routes)

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
        for weight in self._weights:
            pairs += itertools.combinations(weight.ranks, 2)
        apart = {pair for pair in pairs if pair[0] != pair[1]}
        together = [pair for one, other in apart for pair in self._exchanging(one, other)]
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
        """The stages of a rank, with twins where others hold the model's own parameters.

        Args:
            group: of the member whose stages they are, where a group performs the rank's ops.
            wholes: what the model's own parameters are for while stages are built, if for no
                longer.
        """
        twins = self._twins_of(rank, group, wholes)
        first = [0, *itertools.accumulate(map(len, self._layers_of))]
        return {
            stage: Stage(
                stage,
                [self._own(layer, rank, twins) for layer in self._layers_of[stage]],
                first[stage],
                self._streams,
                self._plan.stages[stage].recompute == "layers",
                self.num_slices,
                self._plan.place(stage).warm_up
                if self._plan.versions.activations == "newest"
                else None,
            )
            for stage in stages_held(self._plan, rank)
        }

    def layers_of(self, rank: int) -> dict[int, NamedLayer]:
        """The model's layers that a rank has weights of, by their numbers."""
        first = [0, *itertools.accumulate(map(len, self._layers_of))]
        return {
            number: layer
            for stage in stages_held(self._plan, rank)
            for number, layer in enumerate(self._layers_of[stage], start=first[stage])
        }

    def own_state(self, stage: int) -> dict[str, Tensor]:
        """What the model itself has of a stage, under its keys."""
        return {
            layer.key(key): value
            for layer in self._layers_of[stage]
            for key, value in layer.module.state_dict().items()
        }

    def _twins_of(self, rank: int, group: ChannelGroup | None, wholes: Wholes | None) -> Twins:
        """This rank's copies of what another one has the model's own of."""
        coordinate, foreign = 0 if group is None else group.index, []
        if self._one_process:
            holders = ((weight.parameter, weight.ranks) for weight in self._weights)
            foreign = [one for one, ranks in holders if rank in ranks[0 if coordinate else 1 :]]
        device = self._device(rank, coordinate)
        twins = Twins(foreign, device)
        if group is not None and self.sharings is not None:
            owned = [
                weight.parameter
                for weight in self._weights
                if not self._one_process or rank == weight.ranks[0]
            ]
            has_buffers = not coordinate or not self._one_process
            twins = MemberTwins(foreign, self.sharings, group, device, owned, has_buffers, wholes)
        self._twins[rank, coordinate] = twins
        return twins

    def place(self, rank: int, stages: Mapping[int, Stage], coordinate: int = 0) -> None:
        """Move what a rank, or a member of it, has of the model to its device. What members have
        parts of stays where it is, since none has room for the whole of it."""
        device = self._device(rank, coordinate)
        for stage in stages.values():
            for layer in stage.layers:
                place_parameters(layer.module, device)
        if not coordinate or not self._one_process:
            divided = self._twins[rank, coordinate].divided
            place_buffers(self._modules_with_buffers_of(rank, stages), device, divided)

    def _modules_with_buffers_of(
        self, rank: int, stages: Mapping[int, Stage]
    ) -> Iterator[nn.Module]:
        """The model's own modules whose buffers live where a rank computes: those that no rank
        before it runs. If the rank runs a twin, since it shares a parameter, what its forwards
        write must still become the model's."""
        for index in stages:
            for layer in self._layers_of[index]:
                for module in layer.module.modules():
                    first_rank, _ = min(self._holders.of(module))
                    if first_rank == rank or not self._one_process:
                        yield module

    def place_twins(self, rank: int, coordinate: int = 0) -> None:
        """Give a rank's twins buffers on its device, once those of the model are on theirs."""
        twins = self._twins[rank, coordinate]
        twins.share()
        twins.let_go()  # that the originals were moved is nothing to follow

    def _own(self, layer: NamedLayer, rank: int, twins: Twins) -> NamedLayer:
        alone = not self._one_process or self._holders.runs_first(layer.module, rank)
        if alone and not isinstance(twins, MemberTwins):
            return layer
        return layer._replace(module=twins.of(layer))

    def holdings(self, rank: int, stages: dict[int, Stage]) -> dict[int, Holding]:
        """What each stage of a rank trains."""
        own = self._parameters(stages)
        holdings: dict[int, Holding] = {}
        for stage in stages:
            first = [
                weight
                for weight in self._weights
                if min(weight.stages(rank), default=None) == stage
            ]
            plan, place = self._plan, self._plan.place(stage)
            by_microbatch = plan.versions.asynchronous and plan.versions.updates == "microbatch"
            holdings[stage] = Holding(
                {weight.name: own[weight.place] for weight in first},
                {weight.place: own[weight.place] for weight in first if weight.ranks[0] == rank},
                place,
                plan.versions.delay(place),
                plan.replicas[stage] if by_microbatch else 1.0,
                plan.versions.damping(place),
                *divided(
                    self.sharings,
                    [(one.parameter, own[one.place]) for one in first],
                    whole={id(one.parameter) for one in first if self._has_stand_ins(one)},
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

    @cached_property
    def _groups(self) -> list[list[_Weight]]:
        """Weights with several holders, those with the same users together; apart from them those
        of whose gradients members of groups have terms."""
        groups: dict[tuple[object, bool], list[_Weight]] = defaultdict(list)
        for weight in self._weights:
            if len(weight.ranks) > 1:
                groups[weight.users, self._has_terms(weight)].append(weight)
        return [*groups.values()]

    def _has_terms(self, weight: _Weight) -> bool:
        return self.sharings is not None and id(weight.parameter) in self.sharings.terms

    @property
    def holders(self) -> list[list[tuple[int, ...]]]:
        """The seats that hold each group of shared weights, by its tag and by coordinate: members
        of equal coordinate sum what they have.

        Raises:
            ModelError: groups of different sizes hold one, and the plan's reducer is not the
                transport's.
        """
        if self._plan.summing.reducer in {"servers", "all-reduce"}:
            for first, *_ in self._groups:
                if self._has_stand_ins(first):
                    raise ModelError(
                        f"{first.name!r} is tied between stages of different numbers of tensor "
                        f"ranks, whose sums {self._plan.summing.reducer!r} can't make; take the "
                        "reducer 'owners'"
                    )
        # Where sizes differ, members sum whole values by the transport, which needs no list.
        return [
            [*zip(*map(self.seats_of, first.ranks), strict=False)] for first, *_ in self._groups
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
        for index, weights in enumerate(self._groups):
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
                    of_one_stage and not self._has_terms(first),
                    stand_ins,
                )
            )
        return shared

    def _has_stand_ins(self, weight: _Weight) -> bool:
        """Whether groups of different sizes hold a weight."""
        return len({len(self.seats_of(rank)) for rank in weight.ranks}) > 1

    def shared_state(self, stages: dict[int, Stage]) -> SharedState:
        """What no forward of a rank's stages may write, since others hold it as well."""
        return SharedState(
            {
                index: [
                    tensor
                    for original, layer in zip(self._layers_of[index], stage.layers, strict=True)
                    for tensor in self._holders.shared_tensors(original, layer.module)
                ]
                for index, stage in stages.items()
            }
        )

    def _parameters(self, stages: dict[int, Stage]) -> dict[int, nn.Parameter]:
        """By place in the model, the parameters that these stages compute with."""
        by_original = {id(weight.parameter): weight.place for weight in self._weights}
        parameters: dict[int, nn.Parameter] = {}
        for stage, built in stages.items():
            for original, layer in zip(self._layers_of[stage], built.layers, strict=True):
                pairs = zip(original.module.parameters(), layer.module.parameters(), strict=True)
                parameters.update({by_original[id(theirs)]: ours for theirs, ours in pairs})
        return parameters

    @property
    def twins(self) -> Iterable[nn.Module]:
        """Copied modules, which are not part of the user's model."""
        return (module for twins in self._twins.values() for module in twins.modules)

    def follow(self) -> None:
        """Let ranks follow what has happened to the model since the last step.

        Raises:
            ModelError: what has happened to it cannot be spread as planned.
        """
        self._check_hooks()
        for twins in self._twins.values():
            twins.follow()

    def let_go(self) -> None:
        """The caller may change the model from now on."""
        for twins in self._twins.values():
            twins.let_go()
