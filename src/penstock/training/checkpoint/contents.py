"""The contents of a checkpoint, by the names of the model, whatever plan wrote it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from penstock.base.errors import FileError
from penstock.engine.run.rank.work import PendingGradient
from penstock.engine.transport import Edge
from penstock.training.checkpoint.folder import Checkpoint
from penstock.training.checkpoint.header import Optimizing, TensorExtent, of_json
from penstock.training.checkpoint.piece import CheckpointPiece, assembled
from penstock.training.checkpoint.taking import DRIFT, OPTIMIZER, UNDER_WAY


class Contents:
    """Reads tensors and options of a checkpoint.

    Args:
        checkpoint: a complete one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._pieces_with = checkpoint.pieces_with
        for name, pieces in self._pieces_with.items():
            kinds = {
                (piece.header.tensors[name].dtype, piece.header.tensors[name].shape)
                for piece in pieces
            }
            if len(kinds) > 1:
                raise FileError(f"{checkpoint.folder}: pieces disagree on the shape of {name!r}")
            _check_whole(name, pieces)

    @cached_property
    def position(self) -> Any:
        """Where the run was in its data."""
        return of_json(self.checkpoint.identity.position)

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Keys of the model's parameters and buffers."""
        others = (OPTIMIZER, DRIFT, UNDER_WAY)
        return tuple(name for name in self._pieces_with if not name.startswith(others))

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Entries of the model's ``state_dict`` that are no tensors."""
        return {
            key: of_json(value)
            for piece in self.checkpoint.pieces
            for key, value in piece.header.extra.items()
        }

    def extra_state(self, key: str) -> Any:
        """The value that a module kept beside parameters and buffers, a tensor or not."""
        return self.tensor(key) if key in self._pieces_with else self.extra[key]

    def extent(self, name: str) -> TensorExtent | None:
        """Type and shape of a tensor; ``None`` if the checkpoint has none of this name."""
        pieces = self._pieces_with.get(name)
        return None if pieces is None else pieces[0].header.tensors[name]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, to be read only: its memory may be the file's."""
        pieces = self._pieces_with[name]
        shape = pieces[0].header.tensors[name].shape
        return assembled(name, pieces, (0,) * len(shape), shape)

    def letters(self, rank: int) -> list[PendingGradient]:
        """Gradients that were on their way from a rank when a live stream was saved.

        Raises:
            FileError: their tensors are missing.
        """
        return [
            PendingGradient(
                Edge(heading.source, heading.target, heading.tag),
                heading.unit,
                [None if name is None else self._gradient(name) for name in heading.gradients],
            )
            for piece in self.checkpoint.pieces
            for heading in piece.header.under_way
            if heading.source == rank
        ]

    def _gradient(self, name: str) -> Tensor:
        if name not in self._pieces_with:
            raise FileError(f"{self.checkpoint.folder} lacks {name!r}, which its head names")
        return self.tensor(name).clone()  # its memory may be the file's

    @cached_property
    def state_keys(self) -> dict[str, list[str]]:
        """By parameter, the keys of the optimizer's tensors."""
        keys: dict[str, list[str]] = {}
        for name in self._pieces_with:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                keys.setdefault(parameter, []).append(key)
        return keys

    @cached_property
    def optimizing(self) -> tuple[Optimizing, ...]:
        """The optimizers of all stages that have one."""
        every = (piece.header.optimizing for piece in self.checkpoint.pieces)
        return tuple(optimizing for optimizing in every if optimizing is not None)

    @cached_property
    def trainer_of(self) -> dict[str, Optimizing]:
        """By parameter, the optimizer that trained it."""
        return {name: optimizing for optimizing in self.optimizing for name in optimizing.options}

    def plain_state(self, parameter: str) -> dict[str, Any]:
        """The values that an optimizer kept for a parameter and that are no tensors."""
        for optimizing in self.optimizing:
            if parameter in optimizing.state:
                return {key: of_json(value) for key, value in optimizing.state[parameter].items()}
        return {}


def _check_whole(name: str, pieces: Sequence[CheckpointPiece]) -> None:
    """Raise ``FileError`` unless pieces have as many numbers of a tensor as it has."""
    extents = {
        (extent.start, extent.own_shape)
        for extent in (piece.header.tensors[name] for piece in pieces)
    }
    whole = math.prod(pieces[0].header.tensors[name].shape)
    if sum(math.prod(size) for _, size in extents) != whole:
        raise FileError(f"{pieces[0].path.parent} does not hold all {whole:,} numbers of {name!r}")
