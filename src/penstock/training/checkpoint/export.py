"""A pipeline's weights and checkpoints for programs that know nothing of Penstock.

Inside, members of groups have their parts as plain tensors (``engine.tensor`` says why). Other
programs, ``torch.distributed.checkpoint`` among them, know ``DTensor``: which process of a mesh of
pipe × data × tensor has which part of which tensor. Its parts are those of ``torch.chunk``: the
first ⌈n/t⌉ of n, and so on. Where a member's part is another one (it lies in several blocks, as
queries, keys and values do, or n is no multiple of t), members exchange what they have.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from penstock.base.errors import FileError, InputError
from penstock.base.values import expect, shown
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.placing import building
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.seating import MeshTransport
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.group import Bounds, ChannelGroup, ShardSpec, TensorGroup
from penstock.engine.transport.rendezvous import translated, within
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import Checkpoint
from penstock.training.checkpoint.header import of_json
from penstock.training.checkpoint.piece import write_tensors
from penstock.training.checkpoint.taking import OPTIMIZER


def export_weights(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint's weights and buffers as one safetensors file, under the keys of the
    model's ``state_dict``.

    Raises:
        FileError: it cannot be written.
    """
    contents = Contents(checkpoint)
    weights = {name: contents.tensor(name) for name in contents.weights}
    write_tensors(target, weights, {"format": "pt"})


def export_dcp(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint as a folder of ``torch.distributed.checkpoint``: weights under the model's
    keys, the optimizer's as ``torch.distributed.checkpoint.state_dict`` flattens them
    (``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>``).

    Such a folder has a pickled file in it, which whoever reads it must trust.

    Raises:
        FileError: the folder cannot be written.
    """
    beside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process is what no_dist says
            save(_flattened(checkpoint), checkpoint_id=beside, no_dist=True)
        os.replace(beside, target)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _flattened(checkpoint: Checkpoint) -> dict[str, Any]:
    contents = Contents(checkpoint)
    flat: dict[str, Any] = {name: contents.tensor(name) for name in contents.weights}
    for name, trainer in contents.trainer_of.items():
        for key in contents.state_keys.get(name, ()):
            flat[f"state.{name}.{key}"] = contents.tensor(f"{OPTIMIZER}{name}/{key}")
        for key, value in contents.plain_state(name).items():
            flat[f"state.{name}.{key}"] = value
        for key, value in trainer.options[name].items():
            flat[f"param_groups.{name}.{key}"] = of_json(value)
    return flat


class _Own(NamedTuple):
    """A parameter or buffer of a stage, and what a process or thread has of it.

    Attributes:
        key: in the model.
        value: what there is here.
        shape: of the whole.
        cut: how it is divided; ``None`` if all of it is here.
    """

    key: str
    value: Tensor
    shape: tuple[int, ...]
    cut: ShardSpec | None

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """Where its parts are on a mesh of data × tensor."""
        return Replicate(), Replicate() if self.cut is None else Shard(self.cut.dim)


class MeshEdge:
    """Gives a pipeline's weights as ``DTensor``s, and takes them.

    Args:
        parts: the pipeline.
    """

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._made: DeviceMesh | None = None

    def taken(self) -> dict[str, Tensor]:
        """Copies in main memory of the parameters and buffers of this process's stages, under the
        model's keys. All processes must call it.

        Raises:
            InputError: the plan is no mesh.
            PeerError, DeadlineError: another process did not call it.
        """
        mesh = self._mesh("giving DTensors")["data", "tensor"]
        (worker,) = self._parts.workers
        group = _group(worker)
        given: dict[str, Tensor] = {}
        worker.apply_deferred()
        for index in worker.stages:
            with building(worker.queue), worker.visiting(index):
                for own in self._owned(worker, index):
                    here = own.value.detach() if group is None else _chunk(own, group)
                    local = here.to("cpu", copy=True)
                    stride = torch.empty(own.shape, device="meta").stride()
                    given[own.key] = DTensor.from_local(
                        local,
                        mesh,
                        own.placements,
                        run_check=False,
                        shape=torch.Size(own.shape),
                        stride=stride,
                    )
        return given

    def give(self, state: Mapping[str, Tensor]) -> None:
        """Take weights as ``taken`` gives them, or whole ones. All processes must call it.

        Args:
            state: by the model's keys; it may have more than is needed here.

        Raises:
            InputError: a key is missing, or a value has another shape or lies otherwise; nothing
                has changed then.
            PeerError, DeadlineError: another process did not call it.
        """
        expect(state, Mapping, "the state", "give what dtensor_state_dict() gives")
        for worker in self._parts.workers:
            for index in worker.stages:
                with worker.visiting(index):
                    for own in self._owned(worker, index):
                        _check(state.get(own.key), own)
        if self._parts.in_processes:
            self._mesh("taking DTensors")
        for worker in self._parts.workers:
            worker.drop_deferred()
            for index in worker.stages:
                with building(worker.queue), worker.visiting(index, changes=True):
                    for own in self._owned(worker, index):
                        _put(state[own.key], own, _group(worker))

    def _owned(self, worker: Worker, index: int) -> Iterator[_Own]:
        sharings, stage = self._parts.layout.sharings, worker.stages[index]
        assert isinstance(stage, Stage)
        divided = {} if sharings is None or worker.seat.size == 1 else sharings.cut_keys
        for key, value in stage.state_dict().items():
            if isinstance(value, Tensor):
                cut = divided.get(key)
                whole = sharings.shapes[key] if sharings and cut else tuple(value.shape)
                yield _Own(key, value, whole, cut)

    def _mesh(self, purpose: str) -> DeviceMesh:
        """That of all processes, which come together here."""
        seats = self._by_axes()
        meeting = self._parts.meet(purpose)
        assert meeting is not None
        meeting.exchange(None, NoneType, f"for {purpose}")
        for worker in self._parts.workers:
            number, group = worker.next_number(), _group(worker)
            if group is not None:
                group.begin(number)
        if self._made is None:
            seconds, where = self._parts.deadlines.step.seconds, f"rank {meeting.rank}, {purpose}"
            with translated(where, seconds, "raise deadline_seconds"):
                self._made = within(
                    seconds,
                    lambda: DeviceMesh(
                        "cpu", torch.tensor(seats), mesh_dim_names=("pipe", "data", "tensor")
                    ),
                )
        return self._made

    def _by_axes(self) -> list[list[list[int]]]:
        """The numbers of seats, by their places along the axes pipe, data and tensor.

        Raises:
            InputError: they are no mesh.
        """
        plan, layout = self._parts.plan, self._parts.layout
        if plan.summing.reducer == "fully-sharded" or plan.divides_experts:
            raise InputError(
                "copies of stages have rows of their weights, which has no place yet on a mesh of "
                "pipe × data × tensor; take gather_state_dict(), or save"
            )
        if layout.server_ranks:
            raise InputError(
                "parameter servers have no place on a mesh of pipe × data × tensor; take "
                "gather_state_dict(), save, or another reducer"
            )
        homes = dict.fromkeys(
            tuple(sorted(plan.placement.ranks_of(stage))) for stage in range(len(plan.stages))
        )
        seats = [[[*layout.seats_of(rank)] for rank in home] for home in homes]
        shapes = sorted({(len(home), len(group)) for home in seats for group in home})
        numbers = [seat for home in seats for seat in chain(*home)]
        if len(shapes) > 1 or len({*numbers}) < len(numbers):
            sizes = " and ".join(f"{data} × {tensor}" for data, tensor in shapes)
            raise InputError(
                f"stages have {sizes} copies × tensor ranks, or some of their ranks in common, "
                "which is no mesh of pipe × data × tensor; take gather_state_dict(), or save"
            )
        return seats


def _group(worker: Worker) -> ChannelGroup | None:
    transport = worker.transport
    return transport.group if isinstance(transport, MeshTransport) else None


def _chunk_of(size: int, count: int, index: int) -> Bounds:
    """Which part of a dimension ``torch.chunk`` gives a member.

    >>> [_chunk_of(7, 3, index) for index in range(3)]
    [Bounds(start=0, stop=3), Bounds(start=3, stop=6), Bounds(start=6, stop=7)]
    """
    length = -(-size // count)
    return Bounds(min(index * length, size), min((index + 1) * length, size))


def _lies_in_chunks(own: _Own, cut: ShardSpec, group: TensorGroup) -> bool:
    """Whether the members' parts are those of ``torch.chunk``; the same answer on all of them."""
    length, count = own.shape[cut.dim], group.size
    return all(
        cut.bounds(length, count, index) == [_chunk_of(length, count, index)]
        for index in range(count)
    )


def _chunk(own: _Own, group: TensorGroup) -> Tensor:
    part, cut = own.value.detach(), own.cut
    if cut is None or _lies_in_chunks(own, cut, group):
        return part
    whole = cut.joined(group.exchange([part] * group.size))
    place = _chunk_of(own.shape[cut.dim], group.size, group.index)
    return whole.narrow(cut.dim, place.start, place.length)


def _check(given: object, own: _Own) -> None:
    if not isinstance(given, Tensor):
        has = "lacks" if given is None else f"has {shown(given)} as"
        raise InputError(f"the state {has} {own.key!r}; give all that dtensor_state_dict() gave")
    if tuple(given.shape) != own.shape:
        raise InputError(
            f"the state has {own.key!r} of shape {tuple(given.shape)}, and the model of shape "
            f"{own.shape}; build the model whose state it is"
        )
    if isinstance(given, DTensor) and tuple(given.placements) != own.placements:
        raise InputError(
            f"{own.key!r} lies as {given.placements} in the state, and this pipeline has it as "
            f"{own.placements}; let torch.distributed.checkpoint load into what "
            "dtensor_state_dict() gave, or give whole tensors"
        )


def _put(given: Tensor, own: _Own, group: TensorGroup | None) -> None:
    """Let a member, or a rank, have its part of a value."""
    here = given.to_local() if isinstance(given, DTensor) else given
    here = here.detach().to(own.value.device)
    if own.cut is not None and group is not None:
        if isinstance(given, DTensor):
            here = _of_chunk(here, own, own.cut, group)
        else:
            here = own.cut.part(here, group.size, group.index)
    with torch.no_grad():
        own.value.copy_(here)


def _of_chunk(chunk: Tensor, own: _Own, cut: ShardSpec, group: TensorGroup) -> Tensor:
    """A member's part, where members have what ``_chunk`` gives."""
    if _lies_in_chunks(own, cut, group):
        return chunk
    whole = torch.cat(group.exchange([chunk] * group.size), cut.dim)
    return cut.part(whole, group.size, group.index)
