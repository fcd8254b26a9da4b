"""Who uses each module, parameter and buffer of a model: (rank, stage) of each; and what follows
where there are several.

What several stages or ranks hold, no forward may write. On one device, each forward reads what the
forwards before it have written. Stages and ranks run theirs in another order, or at the same time,
and processes do not even see what others write. What one stage on one rank holds alone is written
and read in the right order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer


class SharedTensor(NamedTuple):
    """A buffer or parameter with several holders.

    Attributes:
        name_for_errors: how these name the tensor.
        holders: how errors name those who hold it.
        module: the module of this rank that has it.
        name: its name in that module.
    """

    name_for_errors: str
    holders: str
    module: nn.Module
    name: str

    def now(self) -> Tensor | None:
        """The tensor itself."""
        module = self.module
        if self.is_buffer:
            return module._buffers.get(self.name)
        return module._parameters.get(self.name)

    @property
    def is_buffer(self) -> bool:
        """Whether the tensor is a buffer, and no parameter."""
        return self.name in self.module._buffers


class SharedState:
    """Notices when a forward of one rank writes what others hold as well.

    Writing is seen by version counters and by which tensor it is, after every forward. Some
    operations count no version (batch norm, and what works on ``.data``), so values of buffers are
    compared too: once all forwards have run, and before weights change.

    Args:
        tensors: what others hold too, by stage of the rank.
    """

    def __init__(self, tensors: Mapping[int, Sequence[SharedTensor]]) -> None:
        self._tensors = tensors
        self._values: list[tuple[SharedTensor, Tensor | None]] = []
        self._unchecked = False

    def begin(self) -> None:
        """Forwards will follow; from now on, values must stay what they are."""
        self._unchecked = False
        self._values = [
            (shared, None if (tensor := shared.now()) is None else tensor.detach().clone())
            for tensors in self._tensors.values()
            for shared in tensors
            if shared.is_buffer
        ]

    def watches(self, stage: int) -> bool:
        """Whether a stage holds anything that others hold."""
        return bool(self._tensors.get(stage))

    @contextmanager
    def unwritten(self, stage: int) -> Iterator[None]:
        """A forward of a stage.

        Raises:
            ModelError: it has written something.
        """
        tensors = self._tensors.get(stage, ())
        before = [_state(shared) for shared in tensors]
        yield
        self._unchecked = bool(self._values)
        for shared, (then, version) in zip(tensors, before, strict=True):
            now, version_now = _state(shared)
            if version_now != version if now is then else not _equal(now, then):
                raise _written(shared)

    def check(self) -> None:
        """All forwards have run, or weights are about to change.

        Raises:
            ModelError: a forward has written something without leaving a trace.
        """
        if self._unchecked:
            self._unchecked = False
            for shared, value in self._values:
                if not _equal(shared.now(), value):
                    raise _written(shared)


def _state(shared: SharedTensor) -> tuple[Tensor | None, int]:
    tensor = shared.now()
    counts = tensor is not None and not tensor.is_inference()
    return tensor, tensor._version if tensor is not None and counts else 0


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    # NaN is not equal to itself.
    both_nan = first.isnan() & second.isnan()
    return torch.equal(first, second) or bool(((first == second) | both_nan).all())


def _written(shared: SharedTensor) -> ModelError:
    return ModelError(
        f"a forward has written {shared.name_for_errors}, which {shared.holders} hold, so that "
        "none would see what it sees on one device; choose a schedule or cuts that leave it in one "
        "stage on one rank, or write it outside of forward"
    )


Users = frozenset[tuple[int, int]]
"""(rank, stage) of each."""


class Replicas:
    """Who holds what of a model.

    Args:
        layers_of: the layers of every stage.
        ranks_of: the ranks that run a stage.
    """

    def __init__(
        self, layers_of: Sequence[Sequence[NamedLayer]], ranks_of: Callable[[int], Iterable[int]]
    ) -> None:
        users: dict[tuple[str, int], Users] = defaultdict(frozenset)
        for stage, layers in enumerate(layers_of):
            own = frozenset((rank, stage) for rank in ranks_of(stage))
            for layer in layers:
                for part in (*_modules_and_parameters(layer.module), *layer.module.buffers()):
                    users[_key(part)] |= own
        self._users: Mapping[tuple[str, int], Users] = users

    def of(self, part: nn.Module | Tensor | None) -> Users:
        """Who runs a module, or holds a parameter or (in the same memory) a buffer."""
        return frozenset() if part is None else self._users[_key(part)]

    def runs_first(self, module: nn.Module, rank: int) -> bool:
        """Whether no rank before this one runs any part of a module, or has a parameter of it."""
        return all(min(self.of(part))[0] == rank for part in _modules_and_parameters(module))

    def check_statistics(self, layers: Iterable[NamedLayer], schedule: str) -> None:
        """Raise ``ModelError`` where statistics would drift apart: ranks that run the same module
        see different values.

        Args:
            schedule: its name, for errors.
        """
        for layer in layers:
            for module in layer.module.modules():
                ranks = sorted({rank for rank, _ in self.of(module)})
                if len(ranks) > 1 and getattr(module, "track_running_stats", False):
                    raise ModelError(
                        f"{schedule} runs {layer.name!r} ({type(module).__name__}) on ranks "
                        f"{ranks}, each of which would gather statistics of its own; choose a "
                        "schedule or cuts that leave it on one rank, or a norm without running "
                        "statistics"
                    )

    def shared_tensors(self, layer: NamedLayer, own: nn.Module) -> Iterator[SharedTensor]:
        """Buffers and parameters of a layer with several holders.

        Args:
            layer: the model's.
            own: the module, or its copy, that a rank runs.
        """
        pairs = zip(layer.module.named_modules(), own.modules(), strict=True)
        for (prefix, module), ours in pairs:
            for name, tensor in (*module._buffers.items(), *module._parameters.items()):
                users = self.of(module) | self.of(tensor)
                if len(users) > 1:
                    kind = "buffer" if name in module._buffers else "parameter"
                    key = layer.key(f"{prefix}.{name}" if prefix else name)
                    called = f"the {kind} {key!r} of layer {layer.name!r}"
                    yield SharedTensor(called, _told(users), ours, name)


def _modules_and_parameters(module: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    yield from module.modules()
    yield from module.parameters()


def _key(part: nn.Module | Tensor) -> tuple[str, int]:
    is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
    if is_buffer and part.layout is torch.strided:
        address = part.untyped_storage().data_ptr()
        if address:
            return "memory", address
    return "object", id(part)


def _told(users: Users) -> str:
    ranks, stages = (sorted(set(numbers)) for numbers in zip(*users, strict=True))
    kind, numbers = ("ranks", ranks) if len(ranks) > 1 else ("stages", stages)
    return f"{kind} {', '.join(map(str, numbers))}"


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


class ModelWeights:
    """The parameters of a model, in the order in which its stages have them.

    Args:
        model: the module that is spread.
        layers_of: the layers of every stage.
        holders: who holds what of them.
        servers: by the rank of each parameter server, the stages that it updates.
        terms: ids of parameters of whose gradients members of groups have terms.
        divided: ids of weights of experts of which copies of a stage have some each.
    """

    def __init__(
        self,
        model: nn.Module,
        layers_of: Sequence[Sequence[NamedLayer]],
        holders: Replicas,
        servers: Mapping[int, Collection[int]],
        terms: Collection[int],
        divided: Collection[int] = (),
    ) -> None:
        self._holders = holders
        self._servers = servers
        self._terms = terms
        self._divided = {*divided}
        self._weights = self._found(model, layers_of)
        self._in_parts: list[Weight] | None = None

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

    def sharded(self, instead: Mapping[int, nn.Parameter]) -> None:
        """Have other parameters in the place of some, in whose place the model has them now.

        Args:
            instead: by the identity of the former.
        """
        self._divided = {id(instead[key]) if key in instead else key for key in self._divided}
        self._weights = [
            weight._replace(parameter=instead.get(id(weight.parameter), weight.parameter))
            for weight in self._weights
        ]
        self._in_parts = None
        for known in ("groups", "tied_ids"):
            self.__dict__.pop(known, None)

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
        if self._in_parts is None:  # known before every step: of most models there is none
            every = in_parts or num_slices > 1
            self._in_parts = [own for own in self._weights if every or len(own.users) > 1]
        for weight in self._in_parts:
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
        of whose gradients members of groups have terms, and those of divided experts."""
        groups: dict[tuple[object, bool, bool], list[Weight]] = defaultdict(list)
        for weight in self._weights:
            if len(weight.ranks) > 1:
                is_divided = id(weight.parameter) in self._divided
                groups[weight.users, self.has_terms(weight), is_divided].append(weight)
        return [*groups.values()]

    def has_terms(self, weight: Weight) -> bool:
        """Whether members of groups have terms of its gradient."""
        return id(weight.parameter) in self._terms
