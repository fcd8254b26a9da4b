"""Out of the engine: the state of one stage, as tensors and the head of a piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import shown
from penstock.engine.reduce.sharding import Shard
from penstock.engine.run.rank.work import PendingGradient
from penstock.engine.stage.stage import Stage
from penstock.engine.weights.shelf import Shelved
from penstock.engine.weights.store import WeightStore
from penstock.training.checkpoint.division import DRIFT, OPTIMIZER, UNDER_WAY, Division
from penstock.training.checkpoint.header import Extent, Optimizing, UnderWay, extent_of
from penstock.training.checkpoint.plain import to_json


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
    division: Division | None = None
    shards: Mapping[nn.Parameter, Shard] = MappingProxyType({})
    groups: Sequence[Sequence[nn.Parameter]] = ()
    part: int = 0
    num_parts: int = 1

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """What the optimizer may have in the place of each parameter, by the parameter's name."""
        own = {
            name: self.shards[one].part if one in self.shards else one
            for name, one in self.named.items()
        }
        return {name: part for name, part in own.items() if part is not None}

    def extent(self, name: str, value: Tensor) -> Extent:
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
        return Extent(dtype=whole.dtype, shape=shape, start=start, size=tuple(value.shape))

    @property
    def whose(self) -> str:
        """How errors name the stage."""
        member = "" if self.division is None else f", tensor rank {self.division.coordinate}"
        return f"stage {self.stage.index}{member}"

    def own(self, name: str, whole: Tensor) -> Tensor:
        """What the stage has here of a whole tensor."""
        return whole if self.division is None else self.division.own(name, whole)

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor of which the stage has this here."""
        if self.division is None:
            return tuple(tensor.shape)
        return self.division.whole_shape(name, tensor)


class StageState(NamedTuple):
    """What a piece will hold.

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
    extents: Mapping[str, Extent] = MappingProxyType({})
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
    for key, value in () if trained.part else trained.stage.state_dict().items():
        if key.startswith((OPTIMIZER, DRIFT, UNDER_WAY)):
            raise InputError(
                f"the model's {key!r} has a name that checkpoints need for something else; rename "
                f"the module {key.partition('.')[0]!r}"
            )
        if isinstance(value, Tensor):
            _check_own_memory(key, value)
            tensors[key] = value
        else:
            extra[key] = to_json(value, f"{key!r} in the model's state_dict")
    own = {name: one for name, one in trained.optimized.items() if name not in elsewhere}
    extents: dict[str, Extent] = {}
    if trained.store is not None:
        for name, parameter in own.items():
            drift = trained.store.drift_of(parameter)
            if drift is not None:
                tensors[f"{DRIFT}{name}"] = drift
    optimizing = None
    if trained.optimizer is not None:
        _check_per_parameter(trained)
        state = _state_by_name(trained, own, tensors, extents)
        scheduler = trained.scheduler
        optimizing = Optimizing(
            kind=type(trained.optimizer).__name__,
            rate=trained.rate,
            options=_options_by_name(trained),
            state=state,
            scheduler=None
            if scheduler is None
            else to_json(
                scheduler.state_dict(),
                f"the state of {trained.whose}'s {type(scheduler).__name__}",
            ),
            num_lowered=0 if trained.store is None else trained.store.num_lowered,
        )
    under_way = tuple(_under_way(letter, tensors) for letter in trained.letters())
    return StageState(tensors, extra, optimizing, under_way, extents)


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
    extents: dict[str, Extent],
) -> dict[str, dict[str, Any]]:
    """What is no tensor, by parameter; tensors go to the others."""
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
                what = f"{type(optimizer).__name__}'s {key!r} of {name!r}"
                others.setdefault(name, {})[key] = to_json(value, what)
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
