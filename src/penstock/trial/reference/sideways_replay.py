"""The reference of a live stream: the same frames, tick by tick, in one loop.

Stage s of N works on frame k at tick k + s, and does three things there, in this order:

1. F: it runs its layers on what stage s−1 made of frame k a tick ago.
2. B: the gradient of frame k − 2(N−1−s), which stage s+1 made a tick ago, goes back *through the
   graph of step 1*: that of another, newer frame. The last stage goes back from its own loss.
3. Its optimizer steps, if a gradient came.

So a stage has one version of its weights and one graph, however many stages there are, and the
gradients of stage s are 2(N−1−s) frames old. A frame without a target gives no gradient, so no
stage steps for it. While the stream begins, stages only run forwards. When it has ended, forwards
go on to the last stage; gradients that are still on their way find no graph and are dropped.

Malinowski et al., "Sideways: Depth-Parallel Training of Video Models", CVPR 2020, arXiv 2001.06232;
Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural Networks",
arXiv 2210.09147.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.base.values import one_of
from penstock.core.versions import Rates
from penstock.engine.model import tree
from penstock.engine.model.optimizer_factory import OptimizerFactory, Parameters
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import NamedLayer, Skip, evaluation_mode, run_layer, spine_of
from penstock.trial.reference.single_device import check_cuts, run_where_it_draws

Gradients = list[Tensor | None]
"""Those of the tensors of a value, in their order."""


class Graph(NamedTuple):
    """The values that a stage has made of a frame, with autograd's graph behind them.

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


class _SidewaysStage:
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
        slopes = iter(_gradients(starts, [*leaves, *self._parameters]))
        given = [next(slopes) for _ in graph.inputs]
        for key, every in graph.recalled.items():
            own = [next(slopes) for _ in every]
            if any(gradient is not None for gradient in own):
                skip_gradients[key] = own
        self._step(list(slopes))
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
    slopes = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True))
    return [next(slopes) if tensor.requires_grad else None for tensor in wanted]


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


class FrameResult(NamedTuple):
    """The results of one frame of a stream.

    Attributes:
        frame: its number among the frames of the stream, from 0.
        output: of the last stage.
        loss: before the frame was learned from; ``None`` without a target.
    """

    frame: int
    output: Any
    loss: Tensor | None


class Borrowed(NamedTuple):
    """One backward: whose gradient went through whose graph.

    Attributes:
        stage: where.
        gradient: the frame that the gradient is of.
        graph: the frame that the stage had just run.
    """

    stage: int
    gradient: int
    graph: int

    @property
    def age(self) -> int:
        """How many frames older the gradient is than the graph."""
        return self.graph - self.gradient


class SidewaysReplay:
    """Learn from a stream of frames as PARTIME does, without a pipeline.

    A frame is one minibatch of one microbatch. ``push`` is one tick of the stream; ``train`` pushes
    all frames and finishes.

    Args:
        model: as given to ``stream``; trained in place. State that its layers carry from frame to
            frame, in buffers or attributes, must be detached by them.
        cuts: how many layers of the spine each stage has.
        loss: from (output, target) of a frame to a scalar.
        optimizer: makes the optimizer of a stage; called once for each stage with parameters.
        rates: ``"divided"``: the learning rates of stage s are those that the optimizer was made
            with, divided by max(1, 2(N−1−s)), as a gradient so old allows no larger ones;
            ``"given"``: they are left alone.
        seed: seeds dropout; a stream with the same seed draws the same. Default: torch's.

    Attributes:
        borrowed: the backwards of the last stream, in the order in which they ran.
        dropped: by stage, the gradients of the last stream that reached it and found no graph to
            go through, because the stream had ended or the newest frame is not learned from.

    Raises:
        InputError: cuts that do not fit the model, or unknown rates.
        ModelError: the model has no spine, or two stages share a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[int],
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory,
        *,
        rates: Rates = "divided",
        seed: int | None = None,
    ) -> None:
        layers = spine_of(model)
        check_cuts(cuts, len(layers))
        one_of("rates", rates, get_args(Rates))
        self._loss = loss
        self._loss_index = len(layers)
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stages: list[_SidewaysStage] = []
        for index, (first, end) in enumerate(pairwise(accumulate(cuts, initial=0))):
            age = 2 * (len(cuts) - 1 - index)
            stage = _SidewaysStage(index, len(cuts), layers[first:end], first, age)
            stage.take_optimizer(names, optimizer, divided=rates == "divided")
            self._stages.append(stage)
        self._num_drawn = 0
        self._frames: dict[int, _FrameUnderWay] = {}
        self.borrowed: list[Borrowed] = []
        self.dropped: list[int] = []
        self._begin()

    def train(self, frames: Iterable[tuple[Any, Any]]) -> list[FrameResult]:
        """Learn from one stream.

        Args:
            frames: (frame, target) of each; a target may be ``None``.

        Returns:
            What the stream tells of each frame, in order.
        """
        seen = [self.push(frame, target) for frame, target in frames]
        return [result for result in seen if result is not None] + self.finish()

    def push(self, frame: Any, target: Any = None, *, learn: bool = True) -> FrameResult | None:
        """Admit a frame, and run one tick.

        Args:
            frame: the input of the first stage.
            target: what the loss compares with; ``None``: the frame gives no gradient.
            learn: whether the frame may be learned from. If not, layers are in evaluation mode, and
                it leaves no graph: gradients of earlier frames that meet it are dropped.

        Returns:
            What came out: of the frame that was admitted N−1 ticks ago, or ``None``.
        """
        if self._ended:
            self._begin()
        self._admitted += 1
        self._frames[self._admitted - 1] = _FrameUnderWay(frame, target, learn)
        return self._tick()

    def finish(self) -> list[FrameResult]:
        """End the stream; the next frame begins another, with the weights and optimizers as they
        are.

        Returns:
            What came out of the frames that were under way.
        """
        # The last frame needs N−1 ticks to the last stage, and its gradient as many to the first.
        seen = [self._tick() for _ in range(2 * (len(self._stages) - 1))]
        self._num_drawn += self._admitted
        self._ended = True
        return [result for result in seen if result is not None]

    def _begin(self) -> None:
        self._admitted = self._now = 0
        self._ended = False
        self._frames, self.borrowed, self.dropped = {}, [], [0] * len(self._stages)

    def _tick(self) -> FrameResult | None:
        # All that a stage reads was made in the last tick: of a frame by the stage before, of a
        # gradient by the stage behind, which has another frame now. So their order is free.
        seen = None
        for stage in self._stages:
            number = self._now - stage.index
            stage.graph = None
            if 0 <= number < self._admitted:
                seen = self._forward(stage, number)
            self._backward(stage, number - stage.age)
        self._now += 1
        return seen

    def _forward(self, stage: _SidewaysStage, number: int) -> FrameResult | None:
        """F; what the stream tells of the frame, if this is the last stage."""
        frame = self._frames[number]
        is_last = stage is self._stages[-1]
        draw = partial(run_where_it_draws, self._streams, (self._num_drawn + number, 0))
        modes = nullcontext() if frame.learn else evaluation_mode(*stage.modules)
        with torch.set_grad_enabled(frame.learn), modes:
            graph = stage.run(number, frame.value, frame.skips, draw)
            loss = None
            if is_last and frame.target is not None:
                compare = partial(self._loss, graph.output)
                loss = draw(self._loss_index, True, compare, frame.target)
        frame.value, frame.skips = handed_on(graph.output), handed_on(graph.skips)
        stage.graph = graph if frame.learn else None
        if not is_last:
            return None
        if frame.learn and loss is not None:
            # The stage goes back from the loss, not from the output.
            stage.graph = graph._replace(output=loss)
            frame.gradients = [torch.ones_like(loss)]
        output = tree.replace(Tensor, Tensor.detach, frame.value)
        return FrameResult(number, output, None if loss is None else loss.detach())

    def _backward(self, stage: _SidewaysStage, number: int) -> None:
        """B and UPDATE, if a gradient of the frame has come and finds a graph."""
        frame = self._frames.get(number)
        if frame is None:
            return
        gradients, frame.gradients = frame.gradients, None
        behind = frame.skip_gradients
        own = {key: behind.pop(key) for key in stage.stashes & behind.keys()}
        if gradients is not None or own:
            if stage.graph is None:
                self.dropped[stage.index] += 1
            else:
                self.borrowed.append(Borrowed(stage.index, number, stage.graph.frame))
                frame.gradients = stage.go_back(gradients, own, behind)
        if stage.index == 0:
            del self._frames[number]  # nothing of it is on its way any more


@dataclass
class _FrameUnderWay:
    """The values and gradients of one frame that are on their way.

    Attributes:
        value: what the last stage that ran made of it, detached.
        target: for the loss; ``None`` if there is none.
        learn: whether it may leave graphs.
        skips: what layers stashed for later stages.
        gradients: of the output of the stage that goes back next, or of the loss.
        skip_gradients: those of what stages in front of that one stashed.
    """

    value: Any
    target: Any
    learn: bool
    skips: dict[str, Any] = field(default_factory=dict)
    gradients: Gradients | None = None
    skip_gradients: dict[str, Gradients] = field(default_factory=dict)
