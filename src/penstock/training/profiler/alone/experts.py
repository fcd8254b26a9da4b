"""The experts of mixtures in layers: what share of a forward they take, how many bytes of tokens
are handed to them, and how evenly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.core.expert_part import ExpertPart
from penstock.engine.model import tree
from penstock.engine.model.experts import FoundExperts, experts_in, tokens_per_expert
from penstock.engine.model.spine import NamedLayer

_DIGITS = 4


class ExpertsWatch:
    """Sees a layer run, as a context that may be entered again, and looks at its experts.

    Args:
        now: a stamp of the time.
    """

    def __init__(self, layer: NamedLayer, now: Callable[[], Any]) -> None:
        self._layer, self._now = layer, now
        self._experts = experts_in(layer.module)
        self._counts = [torch.zeros(own.num_experts) for own in self._experts]
        self._token_bytes = [0] * len(self._experts)
        self._spans: list[list[tuple[Any, Any]]] = []
        self._whole: tuple[Any, Any] = (None, None)
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        self._spans = [[] for _ in self._experts]
        for place, own in enumerate(self._experts):
            for handle in self._watch(place, own):
                self._hooks.callback(handle.remove)
        self._whole = (self._now(), None)
        return self

    def __exit__(self, *_: object) -> None:
        self._whole = (self._whole[0], self._now())
        self._hooks.close()

    def _watch(self, place: int, own: FoundExperts) -> list[Any]:
        since: list[Any] = []

        def opened(_: nn.Module, args: Any, kwargs: Any) -> None:
            tokens, index, *_rest = tree.tensors((args, kwargs))
            self._token_bytes[place] = index.numel() * tokens.shape[-1] * tokens.element_size()
            if not index.is_meta:
                counts = tokens_per_expert(index.detach(), own.num_experts)
                self._counts[place] += counts.cpu()
            since.append(self._now())

        def closed(_: nn.Module, __: Any, output: Tensor) -> None:
            self._spans[place].append((since.pop(), self._now()))

        return [
            own.module.register_forward_pre_hook(opened, with_kwargs=True),
            own.module.register_forward_hook(closed),
        ]

    def parts(self, seconds: Callable[[Any, Any], float]) -> tuple[ExpertPart, ...]:
        """The experts, as they were when the layer ran last.

        Args:
            seconds: those between two stamps.
        """
        return tuple(self._part(place, own, seconds) for place, own in enumerate(self._experts))

    def _part(
        self, place: int, own: FoundExperts, seconds: Callable[[Any, Any], float]
    ) -> ExpertPart:
        whole = seconds(*self._whole)
        inside = sum(seconds(*span) for span in self._spans[place])
        counts = self._counts[place]
        loads = [round(share, _DIGITS) for share in (counts / counts.sum().clamp(min=1)).tolist()]
        return ExpertPart(
            name=self._layer.key(own.path).strip("."),
            num_experts=own.num_experts,
            parameter_bytes=own.num_bytes,
            token_bytes=self._token_bytes[place],
            forward_share=min(inside / whole, 1.0) if whole > 0 else 0.0,
            loads=tuple(loads) if counts.sum() else (),
        )
