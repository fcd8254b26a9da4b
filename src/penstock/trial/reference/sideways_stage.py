"""One stage of a live stream's replay: its layers, its optimizer, and the newest graph.

The other half of ``sideways_replay``, which says whose gradient goes through whose graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.engine.model import tree
from penstock.engine.model.optimizer_factory import OptimizerFactory, Parameters
from penstock.engine.model.spine import NamedLayer, Skip, run_layer

Gradients = list[Tensor | None]
"""Those of the tensors of a value, in their order."""


class Graph(NamedTuple):
    """What a stage has made of a frame, with autograd's graph behind it.

    Attributes:
        frame: its number.
        inputs: the tensors that it was made from; some require gradients.
        recalled: the same of the skips that the stage took.
        output: of the last layer, or the loss.
        skips: what is on its way to later stages, passing through included.
    """

    frame: int
    inputs: list[Tensor]
    recalled: dict[str, list[Tensor]]
    output: Any
    skips: dict[str, Any]


class SidewaysStage:
    """Some consecutive layers of the model, their optimizer, and the newest graph.

    Attributes:
        index: the stage's number.
        age: by how many frames gradients are older than the graph that they go through.
        graph: of the frame that was run in this tick; ``None`` if there is none.
        stashes: keys of what its layers leave for later stages.
        modules: its layers.
    """

    def __init__(
        self, index: int, num_stages: int, layers: Sequence[NamedLayer], first: int, age: int
    ) -> None:
        self.index = index
        self.age = age
        self.graph: Graph | None = None
        self._num_stages = num_stages
        self._layers = list(enumerate(layers, first))
        self._recalls = [key for layer in layers for key in layer.recalls]
        self.stashes = {key for layer in layers for key in layer.stashes} - set(self._recalls)
        self.modules = [layer.module for layer in layers]
        self._parameters = list(nn.ModuleList(self.modules).parameters())
        self._optimizer: torch.optim.Optimizer | None = None

    def take_optimizer(
        self, names: dict[int, str], optimizer: OptimizerFactory, *, divided: bool
    ) -> None:
        """Make the optimizer; ``names`` loses the parameters that are taken."""
        if any(id(parameter) not in names for parameter in self._parameters):
            raise ModelError(
                f"stage {self.index} shares a parameter with a stage before it, whose gradients "
                "are older; let one stage have all layers that use it"
            )
        named = [(names.pop(id(parameter)), parameter) for parameter in self._parameters]
        if not named:
            return
        made = optimizer(Parameters(named, self.index, self._num_stages, self.age))
        for group in made.param_groups:
            for rate in {"lr", "initial_lr"} & group.keys() if divided else ():
                # As the engine does: a sixth is no number that has all its digits.
                group[rate] = group[rate] * (1 / max(1, self.age))
        self._optimizer = made

    def run(
        self, frame: int, value: Any, skips: Mapping[str, Any], draw: Callable[..., Any]
    ) -> Graph:
        """Run the layers on what the stage before made of a frame, cut off from its graph."""
        inputs, value = _cut(value, self.index > 0)
        recalled, under_way = {}, {}
        for key, skip in skips.items():
            leaves, own = _cut(skip, True)
            under_way[key] = Skip.of(own)
            if key in self._recalls:
                recalled[key] = leaves
        for index, layer in self._layers:
            run = partial(run_layer, layer, skips=under_way)
            value = draw(index, layer.module.training, run, value)
        left = {key: skip.taken(key) for key, skip in under_way.items()}
        return Graph(frame, inputs, recalled, value, left)

    def go_back(
        self,
        gradients: Gradients | None,
        stashed: Mapping[str, Gradients],
        skip_gradients: dict[str, Gradients],
    ) -> Gradients | None:
        """Send gradients through the newest graph, and step.

        Args:
            gradients: of the output, or of the loss; ``None`` if none have come.
            stashed: of what the stage stashed.
            skip_gradients: gets those of what it recalled.

        Returns:
            The gradients of its input, if any of it has one.
        """
        graph = self.graph
        assert graph is not None  # the caller has looked
        starts = [] if gradients is None else self._paired(graph.output, gradients)
        for key, own in stashed.items():
            starts += self._paired(graph.skips[key], own)
        leaves = [*graph.inputs, *(leaf for every in graph.recalled.values() for leaf in every)]
        found = iter(_gradients(starts, [*leaves, *self._parameters]))
        given = [next(found) for _ in graph.inputs]
        for key, every in graph.recalled.items():
            own = [next(found) for _ in every]
            if any(gradient is not None for gradient in own):
                skip_gradients[key] = own
        self._step(list(found))
        return given if any(gradient is not None for gradient in given) else None

    def _paired(self, value: Any, gradients: Gradients) -> list[tuple[Tensor, Tensor]]:
        """The tensors of a value that get gradients, with them."""
        pairs = []
        for tensor, gradient in zip(tree.tensors(value), gradients, strict=True):
            if gradient is None or not tensor.requires_grad:
                continue
            if gradient.shape != tensor.shape:
                raise InputError(
                    f"stage {self.index} made {tuple(tensor.shape)} of the newest frame, but the "
                    f"gradient that is to go through it has shape {tuple(gradient.shape)}: frames "
                    "of a stream must have the same shape"
                )
            pairs.append((tensor, gradient))
        return pairs

    def _step(self, gradients: Gradients) -> None:
        """UPDATE; a stage whose parameters have no gradient at all does not step."""
        if self._optimizer is None or all(gradient is None for gradient in gradients):
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _gradients(starts: Sequence[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> Gradients:
    """The gradients of tensors; ``None`` where a tensor has no part in it, or wants none."""
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not starts or not asked:
        return [None] * len(wanted)
    outputs, gradients = zip(*starts, strict=True)
    # Not .backward(), which would copy a gradient into the strides of its tensor: the stage before
    # might then go back through other kernels than it does in a model that is not cut.
    found = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in wanted]


def _cut(value: Any, wants: bool) -> tuple[list[Tensor], Any]:
    """(tensors that get gradients, the value to compute with, which a layer may overwrite)."""
    leaves: list[Tensor] = []

    def cut(tensor: Tensor) -> Tensor:
        # With gradients disabled, a frame leaves no graph.
        leaf = tree.apart(tensor) if wants and torch.is_grad_enabled() else tensor.detach()
        leaves.append(leaf)
        return leaf.clone()

    return leaves, tree.replace(Tensor, cut, value)


def handed_on(value: Any) -> Any:
    """The value without the graphs behind its tensors, of which the same want gradients."""
    return tree.replace(Tensor, tree.apart, value)
