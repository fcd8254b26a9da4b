"""The experts of mixtures in layers: what share of its passes they take, how many bytes of tokens
are handed to them, and how evenly; and how long fewer of them would take for as many tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.core.expert_part import ExpertPart
from penstock.engine.experts.twins import twin_of
from penstock.engine.model import tree
from penstock.engine.model.experts import FoundExperts, experts_in, tokens_per_expert
from penstock.engine.model.spine import NamedLayer

_DIGITS = 4
_MOST_HALVINGS = 3
_ROUNDS = 3


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
        self._given: list[list[Tensor]] = [[] for _ in self._experts]
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
                self._given[place] = [tensor.detach() for tensor in (tokens, index, *_rest)]
            since.append(self._now())

        def closed(_: nn.Module, __: Any, output: Tensor) -> None:
            self._spans[place].append((since.pop(), self._now()))

        return [
            own.module.register_forward_pre_hook(opened, with_kwargs=True),
            own.module.register_forward_hook(closed),
        ]

    def parts(
        self, seconds: Callable[[Any, Any], float], of_layer: float = 0.0
    ) -> tuple[ExpertPart, ...]:
        """The experts, as they were when the layer ran last.

        Args:
            seconds: those between two stamps.
            of_layer: seconds of a forward and a backward of the layer; 0 where these were not
                measured.
        """
        return tuple(
            self._part(place, own, seconds, of_layer) for place, own in enumerate(self._experts)
        )

    def _part(
        self,
        place: int,
        own: FoundExperts,
        seconds: Callable[[Any, Any], float],
        of_layer: float,
    ) -> ExpertPart:
        whole = seconds(*self._whole)
        inside = sum(seconds(*span) for span in self._spans[place])
        everyone, *fewer = self._passes(own, self._given[place], seconds)
        if everyone and of_layer:
            inside, whole = everyone, of_layer
        counts = self._counts[place]
        loads = [round(share, _DIGITS) for share in (counts / counts.sum().clamp(min=1)).tolist()]
        return ExpertPart(
            name=self._layer.key(own.path).strip("."),
            num_experts=own.num_experts,
            parameter_bytes=own.num_bytes,
            token_bytes=self._token_bytes[place],
            share=min(inside / whole, 1.0) if whole > 0 else 0.0,
            fewer=tuple(round(own / everyone, _DIGITS) for own in fewer if everyone),
            loads=tuple(loads) if counts.sum() else (),
        )

    def _passes(
        self, own: FoundExperts, given: Sequence[Tensor], seconds: Callable[[Any, Any], float]
    ) -> list[float]:
        """Seconds of a forward and a backward of all experts, and of half, a quarter, … of them;
        0 where that cannot be measured."""
        numbers = [own.num_experts]
        while numbers[-1] % 2 == 0 and len(numbers) <= _MOST_HALVINGS:
            numbers.append(numbers[-1] // 2)
        rounds = []
        for _ in range(1 + _ROUNDS if given else 0):
            try:
                spans = [self._span(own, number, given) for number in numbers]
            except Exception:  # what cannot be divided is refused when somebody wants it to be
                return [0.0]
            rounds.append([seconds(*span) for span in spans])
        return [statistics.median(column) for column in zip(*rounds[1:], strict=True)] or [0.0]

    def _span(self, own: FoundExperts, number: int, given: Sequence[Tensor]) -> tuple[Any, Any]:
        """When so many of the experts begin and end a forward and a backward of all tokens."""
        tokens, index, weights = given
        parameters = {
            id(weight): nn.Parameter(
                (weight if own.is_list else weight[:number]).detach(), weight.requires_grad
            )
            for weight in own.module.parameters()
        }
        twin = twin_of(own, parameters, range(number))
        # What is dropped has the number behind the last.
        numbers = torch.where(index < own.num_experts, index % number, number)
        forward: Any = type(own.module).forward
        start = self._now()
        made = forward(twin, tokens.clone().requires_grad_(), numbers, weights)
        made.sum().backward()
        return start, self._now()
