"""Out of the engine: the state of one stage, as tensors and the head of a piece.

Checkpoints know whole tensors only, so that any layout can go on from them. A tensor rank writes
its own parts, each with its place; what all members repeat, the first one writes. A part of a
tensor that is divided block by block (queries, keys and values) lies in several places: of those
after the first, each goes to a piece of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import shown
from penstock.engine.reduce.sharding import Shard
from penstock.engine.run.rank.work import PendingGradient
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.group import ShardSpec
from penstock.engine.weights.local_rows import LocalRows, rows_of
from penstock.engine.weights.store import WeightStore
from penstock.engine.weights.transfers import Shelved
from penstock.training.checkpoint.header import (
    Optimizing,
    TensorExtent,
    UnderWay,
    extent_of,
    to_json,
)

OPTIMIZER, DRIFT, UNDER_WAY = "optimizer/", "drift/", "under-way/"
"""How the names of tensors begin that are not the model's own."""


class PartState(NamedTuple):
    """The content of one piece of a stage that has several.

    Attributes:
        part: the piece's number.
        num_parts: how many pieces the stage has.
        tensors: by their names, with their places.
        tells: whether what is no tensor goes there, too.
    """

    part: int
    num_parts: int
    tensors: dict[str, tuple[TensorExtent, Tensor]]
    tells: bool = True


class StageShard(NamedTuple):
    """One member's part of a stage.

    Attributes:
        cuts: how tensors of the model are divided, by their keys.
        shapes: of these, whole.
        num_blocks: the most pieces in which a tensor of the stage is divided.
        coordinate: the member's.
        size: how many members there are.
    """

    cuts: Mapping[str, ShardSpec]
    shapes: Mapping[str, tuple[int, ...]]
    num_blocks: int
    coordinate: int
    size: int

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor of which a member has this."""
        key, own = _key(name), tuple(tensor.shape)
        return self.shapes[key] if key in self.cuts and own == self._own_shape(key) else own

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The member's part of a whole tensor."""
        key = _key(name)
        if key not in self.cuts or tuple(whole.shape) != self.shapes[key]:
            return whole
        return self.cuts[key].part(whole, self.size, self.coordinate)

    def pieces(
        self,
        tensors: Mapping[str, Tensor],
        extents: Mapping[str, TensorExtent],
        copy: int = 0,
        num_copies: int = 1,
    ) -> Iterator[PartState]:
        """The pieces that the member writes; its first one has all but further blocks.

        Args:
            tensors: by their names.
            extents: where they lie in the member's part, if they are not all of it.
            copy: which of the stage's copies writes, where each has rows of its own.
            num_copies: how many write.
        """
        own_pieces = self.size * self.num_blocks
        for block in range(self.num_blocks):
            own: dict[str, tuple[TensorExtent, Tensor]] = {}
            for name, tensor in tensors.items():
                key, within = _key(name), extents.get(name) or extent_of(tensor)
                if key in self.cuts and within.shape == self._own_shape(key):
                    placed = self._placed(key, tensor, within, block)
                    if placed is not None:
                        own[name] = placed
                elif block == self.coordinate == 0:
                    own[name] = within, tensor
            number = self.coordinate * self.num_blocks + block
            yield PartState(copy * own_pieces + number, num_copies * own_pieces, own, not number)

    def _placed(
        self, key: str, tensor: Tensor, within: TensorExtent, block: int
    ) -> tuple[TensorExtent, Tensor] | None:
        """The part of a tensor in a block, and where it lies in the whole; ``None`` if there is
        none.

        Args:
            within: where the tensor lies in the member's part.
        """
        cut, shape = self.cuts[key], self.shapes[key]
        if block >= cut.blocks:
            return None
        places = cut.bounds(shape[cut.dim], self.size, self.coordinate)
        before = sum(place.length for place in places[:block])
        own_start = [*within.start] or [0] * len(shape)
        first = max(own_start[cut.dim], before)
        last = min(own_start[cut.dim] + within.own_shape[cut.dim], before + places[block].length)
        if first >= last and tensor.numel():
            return None
        piece = tensor.narrow(cut.dim, first - own_start[cut.dim], max(last - first, 0))
        start = [*own_start]
        start[cut.dim] = places[block].start + first - before
        size = tuple(piece.shape)
        extent = TensorExtent(dtype=within.dtype, shape=shape, start=tuple(start), size=size)
        return extent, piece

    def _own_shape(self, key: str) -> tuple[int, ...]:
        cut, shape = self.cuts[key], list(self.shapes[key])
        places = cut.bounds(shape[cut.dim], self.size, self.coordinate)
        shape[cut.dim] = sum(place.length for place in places)
        return tuple(shape)


def _key(name: str) -> str:
    """The key of the model's tensor that a tensor of a piece belongs to."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(DRIFT)


class TrainedStage(NamedTuple):
    """One stage of a rank, with what trains it.

    Attributes:
        stage: the stage.
        named: the parameters that this stage trains, by their names in the model.
        optimizer: theirs.
        scheduler: of the optimizer's learning rates.
        rate: what the optimizer's learning rates were multiplied by when it was made.
        store: the versions of the stage's weights, where there are several.
        letters: gives the gradients that are on their way from the stage to those before it, where
            a stream is saved with them.
        division: which part of it this is, where tensor ranks share the stage.
        shards: of parameters of which this rank updates some rows only: which.
        groups: the whole parameters of each of the optimizer's groups.
        part: which of the stage's pieces this rank writes.
        num_parts: how many ranks write a piece of the stage.
    """

    stage: Stage
    named: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    rate: float
    store: WeightStore | None
    letters: Callable[[], Sequence[PendingGradient]] = tuple
    division: StageShard | None = None
    shards: Mapping[nn.Parameter, Shard] = MappingProxyType({})
    groups: Sequence[Sequence[nn.Parameter]] = ()
    part: int = 0
    num_parts: int = 1

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer may have in place of parameters, by the parameters'
        names."""
        own = {
            name: self.shards[parameter].part if parameter in self.shards else parameter
            for name, parameter in self.named.items()
        }
        return {name: part for name, part in own.items() if part is not None}

    def extent(self, name: str, value: Tensor) -> TensorExtent:
        """Where something that is kept for a parameter lies, by the parameter's name."""
        whole = extent_of(value)
        shard = self.shards.get(self.named[name])
        if (
            shard is None
            or shard.part is None
            or value.shape != shard.part.shape
            or not value.dim()
        ):
            return whole
        shape = tuple(self.named[name].shape)
        start = (shard.start,) + (0,) * (len(shape) - 1)
        return TensorExtent(dtype=whole.dtype, shape=shape, start=start, size=tuple(value.shape))

    @property
    def whose(self) -> str:
        """How errors name the stage."""
        member = "" if self.division is None else f", tensor rank {self.division.coordinate}"
        return f"stage {self.stage.index}{member}"

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The part of a whole tensor that the stage has here."""
        return whole if self.division is None else self.division.own(name, whole)

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor of which the stage has this here."""
        if self.division is None:
            return tuple(tensor.shape)
        return self.division.whole_shape(name, tensor)


class StageState(NamedTuple):
    """The state of a stage, as a piece will hold it.

    Attributes:
        tensors: by their names in the file; still the engine's own.
        extra: entries of the stage's ``state_dict`` that are no tensors.
        optimizing: the optimizer, but for its tensors.
        under_way: gradients on their way to other stages, but for their tensors.
        extents: where tensors lie of which this is a part.
        shelved: what is to be read from a tier, by its name in the file.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    optimizing: Optimizing | None
    under_way: tuple[UnderWay, ...] = ()
    extents: Mapping[str, TensorExtent] = MappingProxyType({})
    shelved: Mapping[str, Shelved] = MappingProxyType({})


def state_of(trained: TrainedStage, elsewhere: Collection[str]) -> StageState:
    """The state of a stage.

    Args:
        trained: the stage.
        elsewhere: names of parameters that an earlier stage trains as well, and so saves.

    Raises:
        InputError: something is neither a tensor nor JSON, or a name is one that Penstock needs.
    """
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    extents: dict[str, TensorExtent] = {}
    for key, value in trained.stage.state_dict().items():
        here = rows_of(value)
        if trained.part and here is None:
            continue  # the first copy writes it
        if key.startswith((OPTIMIZER, DRIFT, UNDER_WAY)):
            raise InputError(
                f"the model's {key!r} has a name that checkpoints need for something else; rename "
                f"the module {key.partition('.')[0]!r}"
            )
        if here is not None:
            if here.values.numel():
                tensors[key], extents[key] = here.values, _extent_of_rows(value, here)
        elif isinstance(value, Tensor):
            _check_own_memory(key, value)
            tensors[key] = value
        else:
            extra[key] = to_json(value, f"{key!r} in the model's state_dict")
    own = {
        name: parameter
        for name, parameter in trained.optimized.items()
        # Where ranks have parts of some parameters only, the first copy writes the others.
        if name not in elsewhere and (not trained.part or trained.named[name] in trained.shards)
    }
    if trained.store is not None:
        for name, parameter in own.items():
            drift = trained.store.drift_of(parameter)
            if drift is not None:
                tensors[f"{DRIFT}{name}"] = drift
    optimizing = _optimizing(trained, own, tensors, extents)
    under_way = tuple(_under_way(letter, tensors) for letter in trained.letters())
    return StageState(tensors, extra, optimizing, under_way, extents)


def _extent_of_rows(whole: Tensor, here: LocalRows) -> TensorExtent:
    """Where rows of a parameter lie."""
    start = (here.start,) + (0,) * (whole.dim() - 1)
    return replace(extent_of(whole), start=start, size=tuple(here.values.shape))


def _optimizing(
    trained: TrainedStage,
    own: Mapping[str, nn.Parameter],
    tensors: dict[str, Tensor],
    extents: dict[str, TensorExtent],
) -> Optimizing | None:
    """The optimizer of a stage, but for its tensors, which go to the others."""
    if trained.optimizer is None:
        return None
    _check_per_parameter(trained)
    state = _state_by_name(trained, own, tensors, extents)
    scheduler, schedule = trained.scheduler, None
    if scheduler is not None:
        whose = f"the state of {trained.whose}'s {type(scheduler).__name__}"
        schedule = to_json(scheduler.state_dict(), whose)
    return Optimizing(
        kind=type(trained.optimizer).__name__,
        rate=trained.rate,
        options=_options_by_name(trained),
        state=state,
        scheduler=schedule,
        num_lowered=0 if trained.store is None else trained.store.num_lowered,
    )


def _under_way(letter: PendingGradient, tensors: dict[str, Tensor]) -> UnderWay:
    """The head of gradients that are on their way; their tensors go to the others."""
    (source, target, tag), unit, _ = letter
    names: list[str | None] = []
    for number, gradient in enumerate(letter.value):
        name = None
        if gradient is not None:
            name = f"{UNDER_WAY}{source}.{target}.{tag}.{unit}.{number}"
            tensors[name] = gradient
        names.append(name)
    return UnderWay(source=source, target=target, tag=tag, unit=unit, gradients=tuple(names))


def _check_own_memory(key: str, value: Tensor) -> None:
    """Raise ``InputError`` for a value whose elements share memory, into which none can be read."""
    if any(
        step == 0 and count > 1 for step, count in zip(value.stride(), value.shape, strict=True)
    ):
        raise InputError(
            f"{key!r} is an expanded view of shape {tuple(value.shape)}, into which nothing can be "
            "loaded; clone it where the model is built"
        )


def _check_per_parameter(trained: TrainedStage) -> None:
    """Raise ``InputError`` if an optimizer keeps what belongs to no parameter: nobody could say
    where it belongs when the model is cut elsewhere."""
    optimizer, own = trained.optimizer, {*trained.optimized.values()}
    assert optimizer is not None
    kind = type(optimizer).__name__
    foreign: list[object] = [key for key in optimizer.state if key not in own]
    foreign += sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if foreign:
        raise InputError(
            f"{kind} keeps {shown(foreign[0])} beside what it keeps for each parameter; a "
            "checkpoint cannot divide that between stages: keep it in the parameters' state or in "
            "their groups"
        )


def _state_by_name(
    trained: TrainedStage,
    named: Mapping[str, nn.Parameter],
    tensors: dict[str, Tensor],
    extents: dict[str, TensorExtent],
) -> dict[str, dict[str, Any]]:
    """All that is no tensor, by parameter; tensors go to the others."""
    optimizer = trained.optimizer
    assert optimizer is not None
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(key, str) or "/" in key:
                raise InputError(
                    f"{type(optimizer).__name__} keeps something under {key!r} for {name!r}; a "
                    "checkpoint can only name it by a text without a slash"
                )
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}/{key}"] = value
                extents[f"{OPTIMIZER}{name}/{key}"] = trained.extent(name, value)
            else:
                whose = f"{type(optimizer).__name__}'s {key!r} of {name!r}"
                others.setdefault(name, {})[key] = to_json(value, whose)
    return others


def _options_by_name(trained: TrainedStage) -> dict[str, dict[str, Any]]:
    assert trained.optimizer is not None
    names = {parameter: name for name, parameter in trained.optimized.items()}
    options: dict[str, dict[str, Any]] = {}
    for group in trained.optimizer.param_groups:
        own = {
            key: to_json(value, f"the option {key!r} of {type(trained.optimizer).__name__}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        options.update({names[parameter]: own for parameter in group["params"]})
    return options
