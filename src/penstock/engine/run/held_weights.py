"""Which ranks and stages use each parameter of a model, and what follows from that."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.holders import Holders


class Weight(NamedTuple):
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


class HeldWeights:
    """The parameters of a model, in the order in which its stages have them.

    Args:
        model: the module that is spread.
        layers_of: the layers of every stage.
        holders: who holds what of them.
        servers: by the rank of each parameter server, the stages that it updates.
        terms: ids of parameters of whose gradients members of groups have terms.
    """

    def __init__(
        self,
        model: nn.Module,
        layers_of: Sequence[Sequence[NamedLayer]],
        holders: Holders,
        servers: Mapping[int, Collection[int]],
        terms: Collection[int],
    ) -> None:
        self._holders = holders
        self._servers = servers
        self._terms = terms
        self._weights = self._found(model, layers_of)

    def __iter__(self) -> Iterator[Weight]:
        return iter(self._weights)

    def _found(self, model: nn.Module, layers_of: Sequence[Sequence[NamedLayer]]) -> list[Weight]:
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        named: dict[nn.Parameter, str] = {}
        for layer in itertools.chain.from_iterable(layers_of):
            for key, parameter in layer.module.named_parameters():
                named.setdefault(parameter, layer.key(key))
        return [
            Weight(places[id(parameter)], name, parameter, self._users_of(parameter))
            for parameter, name in named.items()
        ]

    def _users_of(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        """(rank, stage), ascending. Parameter servers update no weights of several stages, each of
        which has an optimizer, and none of whose gradients members of a group have terms: these
        are whole when copies have summed them."""
        users = sorted(self._holders.of(parameter))
        if id(parameter) in self._terms or len({stage for _, stage in users}) > 1:
            users = [user for user in users if user[0] not in self._servers]
        return tuple(users)

    def check_untied(self) -> None:
        """Raise ``ModelError`` for a weight of several stages, of which gradients would be of
        different ages."""
        for weight in self._weights:
            stages = sorted({stage for _, stage in weight.users})
            if len(stages) > 1:
                raise ModelError(
                    f"{weight.name!r} is tied between stages {', '.join(map(str, stages))}, whose "
                    "gradients are of different ages without a flush; put the layers that share it "
                    "into one stage, untie them, or choose a synchronous schedule"
                )

    def check_hooks(self, *, in_parts: bool, num_slices: int) -> None:
        """Raise ``ModelError`` for hooks on parameters that would not see what they see on one
        device: the gradient of a whole microbatch.

        Args:
            in_parts: whether members of groups have parts of parameters.
            num_slices: into how many a microbatch's sequence is cut.
        """
        for weight in self._weights:
            accumulated = weight.parameter._post_accumulate_grad_hooks
            if not accumulated and not weight.parameter._backward_hooks:
                continue
            stages = sorted({stage for _, stage in weight.users})
            if in_parts:
                sees = "tensor ranks each have a part of it"
            elif len(stages) > 1:
                sees = f"stages {', '.join(map(str, stages))} each have a part of the gradient"
            elif num_slices > 1:
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
        held = {stage for stages in self._servers.values() for stage in stages}
        return tuple(
            weight.name
            for weight in self._weights
            if held & {stage for _, stage in weight.users}
            and not {*weight.ranks} & self._servers.keys()
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
    def _tied(self) -> list[Weight]:
        return [weight for weight in self._weights if len({stage for _, stage in weight.users}) > 1]

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
    def groups(self) -> list[list[Weight]]:
        """Weights with several holders, those with the same users together; apart from them those
        of whose gradients members of groups have terms."""
        groups: dict[tuple[object, bool], list[Weight]] = defaultdict(list)
        for weight in self._weights:
            if len(weight.ranks) > 1:
                groups[weight.users, self.has_terms(weight)].append(weight)
        return [*groups.values()]

    def has_terms(self, weight: Weight) -> bool:
        """Whether members of groups have terms of its gradient."""
        return id(weight.parameter) in self._terms
