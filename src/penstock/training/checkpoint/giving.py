"""Into the engine: a checkpoint's state, into one stage of whatever layout.

Everything is held against the checkpoint first (``check_fits``), so that a refusal leaves the model
as it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import FileError, InputError
from penstock.base.values import is_number, shown
from penstock.engine.weights.local_rows import rows_of
from penstock.engine.weights.store import WeightStore
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.header import extent_of, of_json, to_json
from penstock.training.checkpoint.taking import DRIFT, OPTIMIZER, TrainedStage

_RATES = ("lr", "initial_lr")


def check_model(contents: Contents, keys: Iterable[str]) -> None:
    """Raise ``FileError`` unless a checkpoint has these parameters and buffers and no others."""
    wanted, there = set(keys), {*contents.weights, *contents.extra}
    folder = contents.checkpoint.folder
    for verb, names in (("lacks", wanted - there), ("has, beside the model's,", there - wanted)):
        if names:
            some = ", ".join(map(repr, sorted(names)[:3]))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise FileError(
                f"{folder} is of another model: it {verb} {some}{more}; build the model that was "
                "trained, or use another folder"
            )


def check_fits(contents: Contents, trained: TrainedStage, *, weights_only: bool) -> None:
    """Raise unless a checkpoint's state can be given to a stage.

    Raises:
        FileError: a shape or a type differs.
        InputError: the optimizer or the scheduler is another one, or parameters of one group have
            different options in the checkpoint.
    """
    folder = contents.checkpoint.folder
    for key, value in trained.stage.state_dict().items():
        if not _is_extra(key):  # of these only their module knows what they may be
            _check_alike(contents, key, value, trained.whole_shape(key, value))
    if weights_only or trained.optimizer is None:
        return
    kind = type(trained.optimizer).__name__
    for name in _optimized(trained):
        trainer = contents.trainer_of.get(name)
        if trainer is None:
            raise InputError(
                f"{folder} has no optimizer state of {name!r}, which {kind} trains here; load it "
                "with weights_only=True, or give the optimizer what it trained"
            )
        if trainer.kind != kind:
            raise InputError(
                f"{folder} was trained with {trainer.kind}, and this pipeline trains with {kind}; "
                "give the same optimizer, or load with weights_only=True"
            )
    for number, names in enumerate(_groups(trained)):
        _group_options(contents, names, trained.rate, f"group {number} of {trained.whose}'s {kind}")
    _scheduler_state(contents, trained)


def check_settings(
    contents: Contents, names: Collection[str], *, scales: bool, schedules: bool
) -> None:
    """Raise unless a checkpoint was trained as a pipeline trains that goes on from it.

    Args:
        names: those of all parameters; one that is tied has the name of its first layer.
        scales: whether the pipeline has a loss scaler.
        schedules: whether it has learning-rate schedulers.

    Raises:
        FileError: weights that were trained each for itself are tied here.
        InputError: the checkpoint has a scheduler or a loss scaler, and the pipeline has not, or
            the other way round.
    """
    folder = contents.checkpoint.folder
    apart = sorted(contents.trainer_of.keys() - set(names))
    if apart:
        raise FileError(
            f"{folder} has trained {apart[0]!r} for itself, and here it is tied to another "
            "parameter; build the model that was trained, or load with weights_only=True"
        )
    saved = any(trainer.scheduler is not None for trainer in contents.optimizing)
    for kind, there, here in (
        ("learning-rate scheduler", saved, schedules),
        ("grad_scaler", bool(contents.checkpoint.identity.scaler), scales),
    ):
        if there != here and contents.optimizing:
            has, lacks = ("it", "this pipeline") if there else ("this pipeline", "it")
            raise InputError(
                f"{folder}: {has} has a {kind}, and {lacks} has none; build the pipeline as the "
                "one that was saved, or load with weights_only=True"
            )


def _is_extra(key: str) -> bool:
    """Whether a key is that of what a module keeps beside parameters and buffers."""
    return key.rpartition(".")[2] == "_extra_state"


def _check_alike(contents: Contents, key: str, value: Tensor, shape: tuple[int, ...]) -> None:
    extent = contents.extent(key)
    folder = contents.checkpoint.folder
    if extent is None:
        raise FileError(f"{folder} lacks {key!r}")
    own = extent_of(value)
    if (extent.shape, extent.dtype) != (shape, own.dtype):
        raise FileError(
            f"{folder} has {key!r} as {extent.dtype} of shape {extent.shape}, and the model as "
            f"{own.dtype} of shape {shape}; build the model as it was trained"
        )


def _optimized(trained: TrainedStage) -> list[str]:
    """Names of the parameters that a stage's optimizer trains, here or on other ranks."""
    return [name for names in _groups(trained) for name in names]


def _groups(trained: TrainedStage) -> list[list[str]]:
    """Names of the parameters of each group of a stage's optimizer, which all have its options,
    also those that others train."""
    names = {parameter: name for name, parameter in trained.named.items()}
    return [[names[parameter] for parameter in group] for group in trained.groups]


def give(contents: Contents, trained: TrainedStage, *, weights_only: bool) -> None:
    """Give a stage what ``check_fits`` has accepted.

    Args:
        contents: of the checkpoint.
        trained: the stage.
        weights_only: leave the optimizer and the scheduler as they are.
    """
    _give_weights(contents, trained)
    if weights_only or trained.optimizer is None:
        return
    _give_optimizer(contents, trained)
    if trained.scheduler is not None:
        trained.scheduler.load_state_dict(_scheduler_state(contents, trained))
    if trained.store is not None:
        _give_corrections(contents, trained, trained.store)


def _give_weights(contents: Contents, trained: TrainedStage) -> None:
    stage = trained.stage
    state = stage.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if (here := rows_of(value)) is not None:
                last = here.start + len(here.values)
                here.values.copy_(contents.tensor(key)[here.start : last])
            elif not _is_extra(key):
                value.copy_(trained.own(key, contents.tensor(key)))
    if not any(map(_is_extra, state)):
        return
    for layer in stage.layers:
        extra = {
            key: contents.extra_state(layer.key(key))
            for key in layer.module.state_dict()
            if _is_extra(key)
        }
        if extra:
            layer.module.load_state_dict(extra, strict=False)


def _give_corrections(contents: Contents, trained: TrainedStage, store: WeightStore) -> None:
    """Give PipeMare's corrections of the stage's weights; drift that nobody followed begins at
    0."""
    trainer = next((contents.trainer_of[name] for name in _optimized(trained)), None)
    store.num_lowered = 0 if trainer is None else trainer.num_lowered
    for name, parameter in trained.named.items():
        drift = store.drift_of(parameter)
        if drift is None:
            continue
        if contents.extent(f"{DRIFT}{name}") is None:
            drift.zero_()
        else:
            drift.copy_(trained.own(name, contents.tensor(f"{DRIFT}{name}")))


def _give_optimizer(contents: Contents, trained: TrainedStage) -> None:
    optimizer, optimized = trained.optimizer, trained.optimized
    assert optimizer is not None
    tensors: dict[int, dict[str, Tensor]] = {}
    state: dict[int, dict[str, Any]] = {}
    saved_groups = []
    own_groups = optimizer.state_dict()["param_groups"]
    for number, (names, own) in enumerate(zip(_groups(trained), own_groups, strict=True)):
        options = _group_options(contents, names, trained.rate, f"group {number}")
        saved_groups.append({**own, **_on_devices(options, own)})
        here = (name for name in names if name in optimized)
        for name, index in zip(here, own["params"], strict=True):
            parameter = optimized[name]
            tensors[index] = {
                key: _laid_out_like(parameter, _own_part(contents, trained, name, key))
                for key in contents.state_keys.get(name, ())
            }
            state[index] = {**contents.plain_state(name), **tensors[index]}
    given = {index: values for index, values in state.items() if values}
    optimizer.load_state_dict({"state": given, "param_groups": saved_groups})
    _undo_rounding(optimizer, own_groups, tensors)


def _own_part(contents: Contents, trained: TrainedStage, name: str, key: str) -> Tensor:
    """The state that an optimizer keeps for a parameter, or for those of its rows that this rank
    updates."""
    value = trained.own(name, contents.tensor(f"{OPTIMIZER}{name}/{key}"))
    whole = trained.named[name]
    shard = trained.shards.get(whole)
    if shard is None or value.shape != whole.shape or not value.dim():
        return value
    return value[shard.start : shard.stop]


def _on_devices(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are tensors, as rates of captured optimizers, where this optimizer has them."""
    return {
        key: value.to(own[key].device)
        if isinstance(value, Tensor) and isinstance(own.get(key), Tensor)
        else value
        for key, value in options.items()
    }


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy: what is read shares memory with the file's next readers. Sums of squares lie in
    memory as their parameter does, which fused optimizers count on."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)


def _undo_rounding(
    optimizer: torch.optim.Optimizer,
    own_groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """torch gives loaded state the type of its parameter, which may round it: not here."""
    for group, own in zip(optimizer.param_groups, own_groups, strict=True):
        for parameter, index in zip(group["params"], own["params"], strict=True):
            for key, value in tensors.get(index, {}).items():
                now = optimizer.state[parameter][key]
                if now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def _group_options(
    contents: Contents, names: Sequence[str], rate: float, whose: str
) -> dict[str, Any]:
    """The options that all parameters of a group had, with the learning rates of a layout that
    multiplies them by ``rate``.

    Raises:
        InputError: they had different ones.
        FileError: they are none.
    """
    if not names:
        return {}
    first = _options_here(contents, names[0], rate)
    for name in names[1:]:
        options = _options_here(contents, name, rate)
        for key in {*first, *options}:
            if not _alike(key, first.get(key), options.get(key)):
                raise InputError(
                    f"{whose} has {names[0]!r} and {name!r} together, but {key!r} was "
                    f"{shown(first.get(key))} for the one and {shown(options.get(key))} for the "
                    f"other in {contents.checkpoint.folder}; make groups of parameters by their "
                    "names, alike in every layout"
                )
    return first


def _options_here(contents: Contents, name: str, rate: float) -> dict[str, Any]:
    """A parameter's options with its learning rates as this layout multiplies them."""
    trainer = contents.trainer_of[name]
    options = {key: of_json(value) for key, value in trainer.options[name].items()}
    if "params" in options or not is_number(_number_of(options.get("lr", 0.0))):
        raise FileError(f"{contents.checkpoint.folder}: {name!r} has impossible options")
    if trainer.rate != rate:
        options.update(
            {key: options[key] / trainer.rate * rate for key in _RATES if key in options}
        )
    return options


def _alike(key: str, ours: Any, theirs: Any) -> bool:
    if key in _RATES and is_number(ours) and is_number(theirs):
        return math.isclose(ours, theirs, rel_tol=1e-12)  # one may have been multiplied, see above
    return _same(ours, theirs)


def _number_of(value: Any) -> Any:
    return value.sum().item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _scheduler_state(contents: Contents, trained: TrainedStage) -> dict[str, Any]:
    """The state that a stage's scheduler goes on from.

    What is kept for each group follows from the groups' options; the rest must be the same for all
    optimizers whose parameters this one has.

    Raises:
        InputError: it is not, or the checkpoint has no scheduler, or one of another kind.
    """
    if trained.scheduler is None:
        return {}
    assert trained.optimizer is not None
    names = _optimized(trained)
    trainers = [
        trainer for trainer in contents.optimizing if not trainer.options.keys().isdisjoint(names)
    ]
    folder, kind = contents.checkpoint.folder, type(trained.scheduler).__name__
    states = [of_json(trainer.scheduler) for trainer in trainers]
    own = trained.scheduler.state_dict()
    if not states:
        return own
    groups = []
    for number, group_names in enumerate(_groups(trained)):
        options = _group_options(contents, group_names, trained.rate, f"group {number}")
        # A group without parameters trains nothing, and its rate is nobody's.
        groups.append({**trained.optimizer.param_groups[number], **options})
    return _merged(states, own, groups, f"{folder}: the state of {kind}")


def _merged(
    states: Sequence[Any],
    own: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    whose: str,
) -> dict[str, Any]:
    first = states[0]
    if not isinstance(first, dict) or any(state.keys() != own.keys() for state in states):
        raise InputError(f"{whose} is that of another kind of scheduler; give the one it was")
    merged: dict[str, Any] = {}
    for key, value in first.items():
        if key == "base_lrs":
            merged[key] = [group["initial_lr"] for group in groups]
        elif key == "_last_lr":
            merged[key] = [group["lr"] for group in groups]
        elif key == "lr_lambdas" and not any(any(state[key]) for state in states):
            merged[key] = own[key]  # functions, which the script has made anew
        elif key == "_schedulers":
            if any(len(state[key]) != len(own[key]) for state in states):
                raise InputError(
                    f"{whose} has {len(value)} schedulers in it, and this pipeline's has "
                    f"{len(own[key])}; give the ones it had, or load with weights_only=True"
                )
            parts = zip(*(state[key] for state in states), own[key], strict=True)
            merged[key] = [_merged(part[:-1], part[-1], groups, whose) for part in parts]
        else:
            alike = all(_same(state[key], value) for state in states[1:])
            if not alike or (key == "lr_lambdas" and len(value) != len(groups)):
                raise InputError(
                    f"{whose} differs between stages in {key!r}, so that stages cut elsewhere have "
                    "none; load it with the plan it was trained with"
                )
            if is_number(own[key]) != is_number(value):
                raise FileError(f"{whose} has {key!r} as {shown(value)}")
            merged[key] = value
    return merged


def _same(ours: Any, theirs: Any) -> bool:
    return bool(to_json(ours, "it") == to_json(theirs, "it"))  # NaN and tensors, too
