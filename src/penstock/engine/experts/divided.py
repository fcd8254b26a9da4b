"""``DividedExperts``: what one copy of a stage has of the stage's experts, and their routes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.experts.dispatch import Compute, ExpertCopies, route
from penstock.engine.experts.probing import check_apart, draws_inside
from penstock.engine.experts.twins import twin_of
from penstock.engine.model.experts import FoundExperts, experts_in, tokens_per_expert
from penstock.engine.model.spine import NamedLayer
from penstock.engine.weights.local_rows import LocalRows, PartialTensor, whole_norms


class ExpertWeight(NamedTuple):
    """A weight of experts of which this copy has a part.

    Attributes:
        whole: what stands in the model, without values.
        start: the first row that is here.
        rows: the rows that are here: those of this copy's experts, or, of a module of one expert,
            all or none.
    """

    whole: nn.Parameter
    start: int
    rows: nn.Parameter

    @property
    def is_here(self) -> bool:
        """Whether there is anything of it here."""
        return bool(self.rows.numel())


class _RoutedExperts:
    """The experts of one mixture, of which this copy has some; called in the module's place.

    Attributes:
        weights: of all experts.
        num_routed: how many tokens of this copy have gone to each expert since the training began.
    """

    def __init__(
        self, number: int, mixture: FoundExperts, copies: ExpertCopies, everyone: ExpertCopies
    ) -> None:
        self._number = number
        self._module, self._copies, self._num = mixture.module, copies, mixture.num_experts
        self.num_routed = torch.zeros(mixture.num_experts, dtype=torch.int64)
        here = mixture.num_experts // copies.size
        first = copies.index * here
        instead: dict[int, nn.Parameter] = {}
        self.weights: list[ExpertWeight] = []
        own = {f"{number}" for number in range(first, first + here)}
        for name, weight in mixture.module.named_parameters():
            everyone.take_first(weight.detach())
            if mixture.is_list:
                start, count = 0, weight.shape[0] if name.partition(".")[0] in own else 0
            else:
                start, count = first, here
            values = weight.detach()[start : start + count].clone()
            rows = nn.Parameter(values, weight.requires_grad)
            whole = nn.Parameter(PartialTensor(weight, LocalRows(start, values)), False)
            whole.requires_grad_(weight.requires_grad)
            instead[id(weight)] = whole
            self.weights.append(ExpertWeight(whole, start, rows))
        rows_by_id = dict(zip(instead, (own.rows for own in self.weights), strict=True))
        self._twin = twin_of(mixture, rows_by_id, range(first, first + here))
        for module in mixture.module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = instead[id(parameter)]
        forward: Any = type(mixture.module).forward
        self._compute: Compute = partial(forward, self._twin)
        self._is_list = mixture.is_list
        self._signature = inspect.signature(type(mixture.module).forward)
        mixture.module.__dict__["forward"] = self

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        bound = self._signature.bind(self._module, *args, **kwargs)
        _, tokens, expert_index, expert_weights = bound.arguments.values()
        if self._twin.training is not self._module.training:
            self._twin.train(self._module.training)
        self.num_routed += tokens_per_expert(expert_index, self._num)
        flat = tokens.reshape(-1, tokens.shape[-1])
        choices = expert_index.shape[-1]
        made = route(
            self._copies,
            self._number,
            self._num,
            self._compute,
            self._idle,
            flat,
            expert_index.reshape(-1, choices),
            expert_weights.reshape(-1, choices),
        )
        return made.view(tokens.shape)

    def _idle(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """The value of no tokens, which others go back through all the same. As on one device,
        where other tokens came, stacked weights get gradients, which are 0; modules of a list do if
        their code calls them."""
        made = tokens + weights.to(tokens.dtype)
        own = [weight.rows for weight in self.weights if weight.is_here]
        if not self._is_list:
            return made + torch.stack([rows[:0].sum() for rows in own]).sum().to(tokens.dtype)
        called = self._compute(tokens, numbers, weights).to(tokens.dtype)
        wants = any(rows.requires_grad for rows in own)
        return made + called + torch.zeros((), dtype=tokens.dtype, requires_grad=wants)


class DividedExperts:
    """The experts of a stage, of which this copy has some from now on.

    Args:
        layers: the stage's, in main memory, with values of which those of the first of all copies
            count.
        copies: that together have all experts.
        everyone: all copies of the stage.

    Raises:
        ModelError: a layer's experts cannot be divided.
    """

    def __init__(
        self, layers: Sequence[NamedLayer], copies: ExpertCopies, everyone: ExpertCopies
    ) -> None:
        self._copies, self._everyone = copies, everyone
        self._layers = layers
        mixtures = [
            (layer.key(own.path), own) for layer in layers for own in experts_in(layer.module)
        ]
        self._routed: dict[str, _RoutedExperts] = {
            key: _RoutedExperts(number, mixture, copies, everyone)
            for number, (key, mixture) in enumerate(mixtures)
        }

    @property
    def weights(self) -> list[ExpertWeight]:
        """Those of all experts, in the order of the layers."""
        return [weight for routed in self._routed.values() for weight in routed.weights]

    def trained(self) -> list[Tensor]:
        """The parameters here that gradients come to: those of other layers, and rows."""
        others = {
            id(parameter): parameter
            for layer in self._layers
            for parameter in layer.module.parameters()
            if parameter.requires_grad and not isinstance(parameter, PartialTensor)
        }
        here = (own.rows for own in self.weights if own.rows.requires_grad and own.is_here)
        return [*others.values(), *here]

    def norms(self) -> list[Tensor]:
        """The norms of whole gradients, as ``weights``; 0 where there is none. All copies call
        it."""
        return whole_norms([own.rows for own in self.weights], self._copies.add)

    def whole_state(self) -> dict[str, Tensor]:
        """Copies of the experts' weights in the model's names, made anew. All copies call it."""
        by_id = {id(own.whole): own for own in self.weights}
        state: dict[str, Tensor] = {}
        for layer in self._layers:
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                own = by_id.get(id(parameter))
                if own is not None:
                    whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    whole[own.start : own.start + len(own.rows)] = own.rows.detach()
                    self._copies.add(whole)
                    state[layer.key(name)] = whole
        return state

    def loads(self) -> dict[str, list[float]]:
        """The share of tokens of all copies that each expert has had so far, by the name of its
        mixture; all copies call it."""
        shares = {}
        for name, routed in self._routed.items():
            total = routed.num_routed.double()
            self._everyone.add(total)
            shares[name] = (total / total.sum().clamp(min=1)).tolist()
        return shares

    def close(self, *, failed: bool) -> None:
        """No minibatch follows; ``failed`` says whether it is because this rank has failed."""
        self._copies.close(failed=failed)
        self._everyone.close(failed=failed)


def divisible(layers: Sequence[NamedLayer], num_ranks: int, stage: int) -> list[FoundExperts]:
    """The experts of a stage that so many copies divide.

    Raises:
        ModelError: there are none, not as many for each, or they would compute something else:
            they treat tokens together, draw, or have buffers.
    """
    mixtures = [own for layer in layers for own in experts_in(layer.module)]
    if not mixtures:
        raise ModelError(
            f"stage {stage} has expert_ranks={num_ranks} and no experts: a module that takes "
            "tokens, the numbers of their experts and the weights of these, with one row of each "
            "parameter per expert, or a list of them; say divides_experts = True in the class of "
            "yours, or take expert_ranks=1"
        )
    for own in mixtures:
        kind, where = type(own.module).__name__, repr(own.path)
        if own.num_experts % num_ranks:
            raise ModelError(
                f"{where} ({kind}) has {own.num_experts} experts, which {num_ranks} expert ranks "
                "cannot divide evenly; take a number that divides them"
            )
        drops = [m for m in own.module.modules() if isinstance(m, nn.Dropout) and m.p > 0]
        if drops:
            raise ModelError(draws_inside(f"{where} ({kind})"))
        if any(isinstance(weight, PartialTensor) for weight in own.module.parameters()):
            raise ModelError(
                f"{where} ({kind}) has some of its experts only: an earlier Pipeline has divided "
                "them; build the model anew, and load a checkpoint or what gather_state_dict() gave"
            )
        if any(True for _ in own.module.buffers()):
            raise ModelError(
                f"{where} ({kind}) has buffers beside its weights, and only weights are divided; "
                "put them into another module, or take expert_ranks=1"
            )
    check_apart(mixtures, num_ranks)
    return mixtures


def check_untied(layers: Sequence[NamedLayer], weights: Collection[int]) -> None:
    """Raise ``ModelError`` if several modules have one weight of experts that are divided.

    Args:
        layers: of all stages.
        weights: the ids of the experts' weights.
    """
    owners: dict[int, str] = {}
    for layer in layers:
        for path, module in layer.module.named_modules(remove_duplicate=False):
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) not in weights:
                    continue
                key = layer.key(f"{path}.{name}" if path else name)
                first = owners.setdefault(id(weight), key)
                if first != key:
                    raise ModelError(
                        f"experts tied between {first!r} and {key!r} do not go with expert_ranks, "
                        "of which each would divide its own; untie them, or take expert_ranks=1"
                    )
