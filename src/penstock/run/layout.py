"""Which rank holds what of a model: stages, weights with several holders, skips that cross stages.

Under threads, ranks that hold the same weights (tied ones, or a stage with copies) each need memory
of their own for them: their gradients are made at the same time. The first holder has the model's
own parameters, the others twins, which are kept equal.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.planner import Plan
from penstock.randomness import LayerStreams
from penstock.run.program import SkipRoute
from penstock.run.shared_weights import SharedWeights
from penstock.run.updater import Holding
from penstock.slices import check_sliceable
from penstock.spine import NamedLayer
from penstock.stage import Stage
from penstock.store import WeightStore


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
        """That hold a copy."""
        return tuple(sorted({rank for rank, _ in self.users}))

    def stages(self, rank: int) -> frozenset[int]:
        """Of a rank, that use it."""
        return frozenset(stage for user, stage in self.users if user == rank)


class Layout:
    """A model laid out as a plan says.

    Args:
        model: whose layers these are.
        plan: made for it.
        layers: its spine.
        streams: where layers draw random numbers.
        one_process: whether all ranks share this process.

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
        self._weights = self._find_weights(model)
        self._check_buffers()
        if plan.versions.asynchronous:
            self._check_untied()
        self._twins: list[tuple[nn.Module, nn.Module]] = []
        self._equal: list[tuple[nn.Parameter, nn.Parameter]] = []

    def _find_weights(self, model: nn.Module) -> list[_Weight]:
        places = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        found: dict[int, tuple[str, nn.Parameter]] = {}
        users: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for stage, layers in enumerate(self._layers_of):
            holders = self._schedule.ranks_of(stage)
            for layer in layers:
                for key, parameter in layer.module.named_parameters():
                    name = layer.key(key)
                    found.setdefault(id(parameter), (name, parameter))
                    users[id(parameter)] |= {(rank, stage) for rank in holders}
        return [
            _Weight(places[key], name, parameter, tuple(sorted(users[key])))
            for key, (name, parameter) in found.items()
        ]

    def _check_buffers(self) -> None:
        """Ranks that run the same module see different values, so statistics would drift apart."""
        ranks: dict[nn.Module, set[int]] = defaultdict(set)
        for stage, layers in enumerate(self._layers_of):
            holders = self._schedule.ranks_of(stage)
            for layer in layers:
                for module in layer.module.modules():
                    ranks[module].update(holders)
                    if len(ranks[module]) > 1 and getattr(module, "track_running_stats", False):
                        raise ModelError(
                            f"{self._plan.schedule} runs {layer.name!r} ({type(module).__name__}) "
                            f"on ranks {sorted(ranks[module])}, each of which would gather "
                            "statistics of its own; choose a schedule or cuts that leave it on one "
                            "rank, or a norm without running statistics"
                        )

    def _check_untied(self) -> None:
        """Gradients of one weight from several stages would be of different ages."""
        for one in self._weights:
            stages = sorted({stage for _, stage in one.users})
            if len(stages) > 1:
                raise ModelError(
                    f"{one.name!r} is tied between stages {', '.join(map(str, stages))}, whose "
                    "gradients are of different ages without a flush; put the layers that share it "
                    "into one stage, untie them, or choose a synchronous schedule"
                )

    @cached_property
    def shared_stages(self) -> frozenset[int]:
        """Stages that share weights with a stage on another rank."""
        return frozenset(
            stage for one in self._weights if len(one.ranks) > 1 for _, stage in one.users
        )

    @property
    def num_slices(self) -> int:
        """Of a microbatch's sequence."""
        return self._schedule.num_slices

    @cached_property
    def has_copies(self) -> bool:
        """Whether a stage is on several ranks, each with microbatches of its own."""
        return self._schedule.weight_copies > 1

    @cached_property
    def needs_order(self) -> bool:
        """Whether a weight belongs to several stages: then no stage may update before all of its
        rank's gradients are complete."""
        return any(len({stage for _, stage in one.users}) > 1 for one in self._weights)

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

    def stages(self, rank: int) -> dict[int, Stage]:
        """The stages of a rank, with twins where others hold the model's own parameters."""
        replaced = self._twins_of(rank)
        first = [0, *itertools.accumulate(map(len, self._layers_of))]
        return {
            stage: Stage(
                stage,
                [self._own(layer, replaced) for layer in self._layers_of[stage]],
                first[stage],
                self._streams,
                self._plan.stages[stage].recompute == "layers",
                self.num_slices,
            )
            for stage in self._schedule.stages_of[rank]
        }

    def _twins_of(self, rank: int) -> dict[int, nn.Parameter]:
        """By the id of the model's parameter, this rank's own copy of it."""
        if not self._one_process:
            return {}
        twins = {}
        for one in self._weights:
            if rank in one.ranks[1:]:
                parameter = one.parameter
                twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                twins[id(parameter)] = twin
                self._equal.append((parameter, twin))
        return twins

    def _own(self, layer: NamedLayer, replaced: dict[int, nn.Parameter]) -> NamedLayer:
        parameters = list(layer.module.parameters())
        if not any(id(parameter) in replaced for parameter in parameters):
            return layer
        # A copy of the modules alone: what is not replaced stays the model's own.
        kept = {id(one): one for one in (*parameters, *layer.module.buffers())}
        twin = copy.deepcopy(layer.module, {**kept, **replaced})
        self._twins.append((layer.module, twin))
        return layer._replace(module=twin)

    def holdings(self, rank: int, stages: dict[int, Stage]) -> dict[int, Holding]:
        """What each stage of a rank trains."""
        own = self._parameters(stages)
        found: dict[int, Holding] = {}
        for stage in stages:
            first = [one for one in self._weights if min(one.stages(rank), default=None) == stage]
            plan, place = self._plan, self._plan.place(stage)
            by_microbatch = plan.versions.asynchronous and plan.versions.updates == "microbatch"
            found[stage] = Holding(
                {one.name: own[one.place] for one in first},
                {one.place: own[one.place] for one in first if one.ranks[0] == rank},
                place,
                plan.versions.delay(place),
                plan.replicas[stage] if by_microbatch else 1.0,
            )
        return found

    def stores(
        self, stages: dict[int, Stage], optimizers: Mapping[int, torch.optim.Optimizer]
    ) -> dict[int, WeightStore]:
        """Where the versions of a rank's weights are kept, if there are several."""
        plan = self._plan
        if not plan.versions.asynchronous:
            return {}
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

    def shared(self, rank: int, stages: dict[int, Stage]) -> list[SharedWeights]:
        """The weights of a rank that others hold, too; those with the same users together."""
        own = self._parameters(stages)
        groups: dict[tuple[tuple[int, int], ...], list[_Weight]] = defaultdict(list)
        for one in self._weights:
            if len(one.ranks) > 1:
                groups[one.users].append(one)
        return [
            SharedWeights(
                index,
                group[0].ranks,
                group[0].stages(rank),
                tuple(own[one.place] for one in group),
            )
            for index, group in enumerate(groups.values())
            if rank in group[0].ranks
        ]

    def _parameters(self, stages: dict[int, Stage]) -> dict[int, nn.Parameter]:
        """By place in the model, the parameters that these stages compute with."""
        by_original = {id(one.parameter): one.place for one in self._weights}
        found = {}
        for stage, built in stages.items():
            for original, layer in zip(self._layers_of[stage], built.layers, strict=True):
                pairs = zip(original.module.parameters(), layer.module.parameters(), strict=True)
                found.update({by_original[id(theirs)]: ours for theirs, ours in pairs})
        return found

    @property
    def twins(self) -> Iterable[nn.Module]:
        """Copied modules, which are not part of the user's model."""
        return (twin for _, twin in self._twins)

    def follow(self) -> None:
        """Let twins follow what has happened to the model since the last step: training mode, what
        is frozen, and weights that were loaded or changed by hand."""
        for original, copied in self._twins:
            for theirs, ours in zip(original.modules(), copied.modules(), strict=True):
                ours.training = theirs.training
        with torch.no_grad():
            for parameter, twin in self._equal:
                # Always: a change through ``.data`` leaves no trace.
                twin.copy_(parameter)
                twin.requires_grad = parameter.requires_grad
