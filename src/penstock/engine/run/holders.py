"""Who runs a module, trains a parameter or reads a buffer: (rank, stage) of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.shared_state import SharedTensor

Users = frozenset[tuple[int, int]]
"""(rank, stage) of each."""


class Holders:
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
            own: the module, or its twin, that a rank runs.
        """
        pairs = zip(layer.module.named_modules(), own.modules(), strict=True)
        for (prefix, module), ours in pairs:
            for name, tensor in (*module._buffers.items(), *module._parameters.items()):
                users = self.of(module) | self.of(tensor)
                if len(users) > 1:
                    kind = "buffer" if name in module._buffers else "parameter"
                    key = layer.key(f"{prefix}.{name}" if prefix else name)
                    told = f"the {kind} {key!r} of layer {layer.name!r}"
                    yield SharedTensor(told, _told(users), ours, name)


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
