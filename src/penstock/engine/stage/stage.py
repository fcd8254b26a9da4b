"""A stage: some consecutive layers, and what they keep between forward and backward.

A stage knows nothing of schedules, ranks or threads. Its interface is one function per kind of
compute op: F, B, I, W and R.

Autograd graphs never cross a stage's border: inputs come in detached, outputs go out detached, and
gradients are handed over by hand. Of the outputs only the graph edge is kept, not the values, so a
sent output does not occupy memory until its backward.

What may happen to a microbatch::

    forward(EVERYTHING) ──────────────────────────────▶ backward
    forward(SPLIT) ───────────────────────────────────▶ backward_input ──▶ backward_weight
    forward(INPUT) ──▶ recompute(EVERYTHING or SPLIT) ──▶ as above

Where microbatches are sliced, this happens to each slice; forwards in order, backwards in reverse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.engine.device.crossing import copy_of
from penstock.engine.experts.dispatch import ExpertCopies
from penstock.engine.experts.divided import DividedExperts
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.replay import Past, first_run_only, repeating
from penstock.engine.model.spine import NamedLayer, Skip
from penstock.engine.stage.backends import Backend
from penstock.engine.stage.deferral import (
    Deferral,
    GradientsInForward,
    undeferred_parameters,
)
from penstock.engine.stage.layer_runs import (
    DirectCalls,
    LayerRuns,
    apart_from_buffers,
    explain_overwritten,
)
from penstock.engine.stage.microbatch_graph import (
    Gradients,
    InputGradients,
    MicrobatchGraph,
    Produced,
    TrainedParameters,
    check_finite,
    cut,
    scalar,
    sent,
)
from penstock.engine.stage.newest_graph import NewestGraph
from penstock.engine.stage.protocol import (
    NO_SKIPS,
    Criterion,
    DeferredGradients,
    Keep,
    StageGraph,
)
from penstock.engine.stage.slices import Relay, slice_name
from penstock.engine.tensor.seen_whole import SharedOutput
from penstock.engine.weights.gradient_slots import GradientSlots
from penstock.engine.weights.sharded_layers import Copies, ShardedLayers

if TYPE_CHECKING:
    from penstock.engine.stage.compiled_passes import CompiledStage

__all__ = ["Criterion", "Gradients", "InputGradients", "Keep", "Produced", "Stage"]

K = TypeVar("K")
_copied = partial(tree.apart, made=copy_of)
_SPLIT, _INPUT = Keep.SPLIT, Keep.INPUT  # until Python 3.12, members take longer to look up


@dataclass(frozen=True)
class _ForwardCall:
    """The arguments of a forward; ``where``: (step, microbatch, slice), for random streams."""

    microbatch: int
    inputs: Any
    where: tuple[int, int, int]
    criterion: Criterion | None
    skips: Mapping[str, Any]


class Stage:
    """Consecutive layers of a model.

    Args:
        index: the stage's number.
        first_layer: index of the stage's first layer in the whole model.
        streams: where layers draw random numbers.
        recompute_layers: keep only each layer's input, and run the layer again when its backward
            comes; layers of a captured model block by block. Only the first run changes buffers;
            forward hooks of users may fire in both.
        num_slices: how many slices a microbatch has. With more than one, the number of a microbatch
            stands for that of a slice in all functions: microbatch × ``num_slices`` + slice.
        age: how many microbatches older gradients are than the forward through which they go back:
            the newest, of which alone anything is kept. ``None``: each goes through its own.
        shared_output: how the last layer's output is seen by a loss, or becomes whole, where a
            member of a group has a part of it.

    Attributes:
        index: the stage's number.
        layers: of the model, in order.
        layer_modules: their modules.
        recalls: keys of the skips that it takes from earlier stages.
        sharded: its layers, if they have rows of weights that other copies have the rest of.
        experts: those that are here, if other copies have the rest.
    """

    sharded: ShardedLayers | None = None
    experts: DividedExperts | None = None

    def __init__(
        self,
        index: int,
        layers: Sequence[NamedLayer],
        first_layer: int,
        streams: LayerStreams,
        recompute_layers: bool = False,
        num_slices: int = 1,
        age: int | None = None,
        shared_output: SharedOutput | None = None,
    ) -> None:
        if not layers:
            raise InputError(f"stage {index} has no layers")
        self.index = index
        self._newest = None if age is None else NewestGraph(index, age)
        self._stays_finite = False
        self._shared_output = shared_output
        self.layers = tuple(layers)
        self._first_layer = first_layer
        self._criterion_index = first_layer + len(self.layers)
        self._streams = streams
        self._num_slices = num_slices
        self._layer_runs = LayerRuns(
            self.layers, first_layer, streams, recompute_layers, num_slices
        )
        carries = self._layer_runs.carries
        self._carried = Relay(index, carries, num_slices, backward=False)
        self._carried_back = Relay(index, carries, num_slices, backward=True)
        self.layer_modules = tuple(layer.module for layer in self.layers)
        every = (module for layer in self.layer_modules for module in layer.modules())
        self._modules = tuple({id(module): module for module in every}.values())
        self._undeferred = undeferred_parameters(self._modules)
        self._own_trained = TrainedParameters(self._modules)
        self._trained: Callable[[], Sequence[Tensor]] = self._own_trained
        stashed = {key for layer in self.layers for key in layer.stashes}
        self.recalls = tuple(
            key for layer in self.layers for key in layer.recalls if key not in stashed
        )
        self._compiled: CompiledStage | None = None
        self._graphs: dict[int, StageGraph] = {}
        self._past: dict[int, tuple[_ForwardCall, Past]] = {}
        self._deferred: dict[int, DeferredGradients] = {}
        self._slots: GradientSlots | None = None
        self._has_looked = False

    def write_gradients_to(self, slots: GradientSlots | None) -> None:
        """Write gradients of whole backwards where they are added up, from the second forward on:
        in the first one it is seen whether a layer takes gradients by itself, which forbids it."""
        self._slots = slots

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All that its layers consist of, each once."""
        return self._modules

    def shard(self, copies: Copies, *, frees_with: int | None) -> None:
        """Keep rows of the layers' weights from now on; arguments as for ``ShardedLayers``.

        Raises:
            ModelError: a layer cannot be sharded.
        """
        self.sharded = ShardedLayers(self.layers, copies, frees_with=frees_with)
        self._trained = self.sharded.trained

    @property
    def has_rows(self) -> bool:
        """Whether it has some rows of weights only."""
        return self.sharded is not None or self.experts is not None

    def divide_experts(self, copies: ExpertCopies, everyone: ExpertCopies) -> None:
        """Keep some of the experts from now on; arguments as for ``DividedExperts``."""
        self.experts = DividedExperts(self.layers, copies, everyone)
        self._trained = self.experts.trained

    def compile(self, backend: Backend) -> None:
        """Run passes with gradients as compiled functions from now on: the first of their kind
        traces and compiles them, which takes seconds.

        Raises:
            ModelError: the layers have hooks, which no such function would call.
        """
        # torch's compilers take a second to import, and few stages need them.
        from penstock.engine.stage.compiled_passes import CompiledStage

        self._compiled = CompiledStage(
            self.index,
            self.layers,
            self._first_layer,
            backend,
            recompute=self._layer_runs.recomputes,
        )

    def stay_finite(self) -> None:
        """From now on, raise ``NotFinite`` where weights would learn through a microbatch that is
        not finite: in the forward if gradients of others would come through it, else in the
        backward, before anything that it has made is used."""
        self._stays_finite = True
        if self._newest is not None:
            self._newest.stays_finite = True

    @property
    def in_flight(self) -> int:
        """Microbatches of which anything is still kept."""
        kept = {*self._graphs, *self._past, *self._deferred}
        return len(kept) + (self._newest is not None and self._newest.there)

    @property
    def num_dropped(self) -> int:
        """Backwards that had gradients and nothing to go through, so that the gradients ended
        here; always 0 where each goes through its own forward."""
        return 0 if self._newest is None else self._newest.num_dropped

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        step: int = 0,
        criterion: Criterion | None = None,
        keep: Keep = Keep.EVERYTHING,
        skips: Mapping[str, Any] = NO_SKIPS,
        first: int = 0,
    ) -> Produced:
        """F: run the layers on one microbatch; keep what is asked if gradients are enabled.

        Args:
            microbatch: its number, by which the other functions find what was kept.
            inputs: a tensor or nested tensors; detached here.
            step: the minibatch's number, for random streams.
            criterion: turns the output into the loss; given to the last stage.
            keep: what for.
            skips: what layers of earlier stages stashed for layers of this one, by key.
            first: the number of the minibatch's first microbatch, from which random streams count.

        Raises:
            InputError: ``skips`` are not those that the layers recall, a value hides its tensors,
                or the loss is no number with a gradient.
            NotFinite: what is made is not, and gradients of others would come through it.
        """
        compiled = self._compiled if torch.is_grad_enabled() else None
        if compiled is None and not skips and self._is_plain(inputs, criterion, keep):
            calls = self._layer_runs.direct_calls(step)
            if calls is not None:
                return self._forward_plainly(microbatch, inputs, calls, criterion, keep)
        if set(skips) != set(self.recalls):
            raise InputError(
                f"stage {self.index} recalls {sorted(self.recalls)} from earlier stages, but "
                f"was given {sorted(skips)}"
            )
        if compiled is not None and keep is not _INPUT:
            produced, left = compiled.forward(microbatch, step, inputs, skips, criterion, keep)
            self._keep(microbatch, left, produced)
            return produced
        taken = self._carried.take(microbatch)
        where = (step, *divmod(microbatch - first, self._num_slices))
        given = _ForwardCall(microbatch, inputs, where, criterion, {**skips, **taken})
        if torch.is_grad_enabled() and keep is _INPUT:
            produced = self._forward_keeping_input(given)
        else:
            produced, graph = self._run(given, keep)
            self._keep(microbatch, graph if torch.is_grad_enabled() else None, produced)
        return produced._replace(skips=self._carried.leave(microbatch, produced.skips))

    def recompute(self, microbatch: int, keep: Keep = Keep.EVERYTHING) -> None:
        """R: run the forward again, which had kept the input only.

        Random numbers, buffers and autocast are those of the first run; buffers change no second
        time. Forward hooks of users fire again.

        Args:
            microbatch: one that ``forward`` has run with ``Keep.INPUT``.
            keep: what for: ``EVERYTHING`` or ``SPLIT``.

        Raises:
            InputError: there is nothing to recompute.
        """
        if keep is _INPUT:
            raise InputError("recompute must keep EVERYTHING or SPLIT; the input is kept already")
        given, past = self._take(self._past, microbatch, "recompute", "a forward that keeps INPUT")
        with torch.enable_grad(), repeating(past, self._layer_runs.formers):
            _, self._graphs[microbatch] = self._run(given, keep)

    def backward(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """B: full backward of one microbatch; accumulates into ``.grad`` of the parameters.

        Args:
            microbatch: one that ``forward`` or ``recompute`` has run.
            gradients: those of the output's leaves.
            skip_gradients: those of the skips that the forward made, by key; none where missing.
                If several are of one value, they are summed in this order: the last reader's first.

        Raises:
            InputError: there is nothing to go back through, or the gradients have other shapes than
                what the newest forward has made.
            NotFinite: a gradient that it has made is not; see ``stay_finite``.
        """
        if self._newest is not None:
            graph = self._newest.take(microbatch, gradients, skip_gradients)
            if graph is None:
                return InputGradients([None], {key: [None] for key in self.recalls})
        else:
            graph = self._take(self._graphs, microbatch, "backward", "a forward")
        result = self._go_back(microbatch, graph, gradients, skip_gradients)
        if graph.deferral is not None:
            graph.deferral.run()
        if self._stays_finite:
            through = microbatch if self._newest is None else self._newest.microbatch
            made = [*result.inputs, *chain.from_iterable(result.skips.values())]
            weights = [own.grad for own in graph.parameters if own.grad is not None]
            name = f"a gradient that has come back through stage {self.index}"
            check_finite(through, name, made, weights)
        return result

    def backward_input(
        self,
        microbatch: int,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients] = NO_SKIPS,
    ) -> InputGradients:
        """I: the gradients of the input; ``backward_weight`` must follow.

        The weight gradients of linear layers, convolutions and embeddings are deferred; those of
        other parameters are accumulated here. Arguments as in ``backward``.

        Raises:
            InputError: the microbatch was not kept with ``Keep.SPLIT``, or its I was done.
        """
        wanted = "a forward or recompute that keeps SPLIT"
        graph = self._graphs.get(microbatch)
        if graph is None or graph.deferral is None:
            raise self._missing(microbatch, "backward_input", wanted)
        del self._graphs[microbatch]
        result = self._go_back(microbatch, graph, gradients, skip_gradients)
        self._deferred[microbatch] = graph.deferral
        return result

    def backward_weight(self, *microbatches: int) -> None:
        """W: accumulate what ``backward_input`` deferred, one microbatch after the other.

        Raises:
            InputError: a microbatch's I was not done, or its W was.
        """
        for microbatch in microbatches:
            self._take(self._deferred, microbatch, "backward_weight", "its backward_input").run()

    def held(self, microbatch: int) -> list[Tensor]:
        """Tensors kept of a microbatch outside of autograd's graph, for those who count memory."""
        held: list[Any] = []
        if microbatch in self._past:
            given, _ = self._past[microbatch]
            held += [given.inputs, dict(given.skips)]
        graph = self._graphs.get(microbatch)
        if self._newest is not None:
            graph = self._newest.of(microbatch)
        if graph is not None:
            held += graph.held()
        if microbatch in self._deferred:
            held += self._deferred[microbatch].held()
        return tree.tensors(held)

    def forget(self) -> None:
        """Drop what unfinished microbatches have left, after a failed step, and what is gathered
        for the step."""
        for kept in (self._graphs, self._past, self._deferred):
            kept.clear()
        self._own_trained.forget()
        self._layer_runs.forget()
        if self._newest is not None:
            self._newest.forget()
        self._carried.forget()
        self._carried_back.forget()
        if self.sharded is not None:
            self.sharded.free()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter once."""
        every = (p for layer in self.layers for p in layer.module.parameters())
        yield from {id(parameter): parameter for parameter in every}.values()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers, and what modules keep besides, under the keys that the unsplit
        model gives them."""
        return {
            layer.key(key): value
            for layer in self.layers
            for key, value in layer.module.state_dict().items()
        }

    def _is_plain(self, inputs: Any, criterion: Criterion | None, keep: Keep) -> bool:
        """Whether a forward is given nothing of what makes ``_run`` long: as nearly all are, every
        time but the first. Looking for the rest costs more than small layers themselves."""
        return (
            type(inputs) is Tensor
            and keep is not _INPUT
            and (criterion is None or self._streams.is_quiet(self._criterion_index, True))
        )

    def _forward_plainly(
        self,
        microbatch: int,
        inputs: Tensor,
        calls: DirectCalls,
        criterion: Criterion | None,
        keep: Keep,
    ) -> Produced:
        """As ``forward``, where no layer draws, recalls, stashes, carries or will run again."""
        wants = torch.is_grad_enabled()
        if not (wants and self._first_layer > 0 and inputs.requires_grad):
            leaf = value = inputs.detach()
        elif calls.only_reads and inputs.is_contiguous():
            leaf = value = inputs.detach().requires_grad_()
        else:
            leaf, value = tree.cut(inputs, True)
        deferral = self._deferral(keep) if wants else None
        if deferral is None and (self._slots is None or self._has_looked):
            # Nearly always, and a context that does nothing takes as long as a layer.
            value = self._called_in_turn(calls, value, criterion)
        else:
            with deferral or self._look():
                value = self._called_in_turn(calls, value, criterion)
        graph = None
        if wants:
            graph = MicrobatchGraph.of(
                [leaf], NO_SKIPS, value, NO_SKIPS, False, deferral, self._trained
            )
        produced = Produced(self._leaving(value, criterion), {})
        self._keep(microbatch, graph, produced)
        return produced

    def _called_in_turn(self, calls: DirectCalls, value: Any, criterion: Criterion | None) -> Any:
        """The output of the layers, or the loss."""
        value = self._seen(calls.run(value), criterion)
        if criterion is None:
            return value
        return scalar(criterion(value), torch.is_grad_enabled())

    def _deferral(self, keep: Keep) -> Deferral | None:
        """What diverts weight gradients of a forward, if anything does."""
        if keep is _SPLIT:
            return Deferral(self._undeferred)
        slots = self._slots if self._has_looked else None
        return None if slots is None else Deferral(self._undeferred, slots)

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """Around a forward: see in the first one that learns whether a layer goes back in it."""
        if self._slots is None or self._has_looked or not torch.is_grad_enabled():
            yield
            return
        with GradientsInForward() as seen:
            yield
        self._has_looked = True
        if seen.any:
            self._slots = None

    def _keep(self, microbatch: int, graph: StageGraph | None, produced: Produced) -> None:
        """Keep what a forward leaves for a backward; ``None``: there will be none."""
        if self._newest is not None:
            self._newest.replace(microbatch, graph, produced)
        elif graph is not None:
            self._graphs[microbatch] = graph

    def _take(self, kept: dict[int, K], microbatch: int, action: str, wanted: str) -> K:
        if microbatch not in kept:
            raise self._missing(microbatch, action, wanted)
        return kept.pop(microbatch)

    def _missing(self, microbatch: int, action: str, wanted: str) -> InputError:
        state = "nothing of it is kept"
        if microbatch in self._past:
            state = "only its input is kept; recompute it first"
        elif microbatch in self._graphs:
            split = self._graphs[microbatch].deferral is not None
            state = f"its forward kept {'SPLIT' if split else 'EVERYTHING'}"
        elif microbatch in self._deferred:
            state = "its backward_input is done and its backward_weight is due"
        return InputError(
            f"{action} of {slice_name(microbatch, self._num_slices)} on stage {self.index} needs "
            f"{wanted} before it, but {state}"
        )

    def _go_back(
        self,
        microbatch: int,
        graph: StageGraph,
        gradients: Gradients,
        skip_gradients: Mapping[str, Gradients],
    ) -> InputGradients:
        carries = self._layer_runs.carries
        if carries:
            skip_gradients = {**skip_gradients, **self._carried_back.take(microbatch)}
        try:
            result = graph.backward(gradients, skip_gradients)
        except RuntimeError as error:
            explain_overwritten(self.layers, error)
            raise
        if carries:
            return result._replace(skips=self._carried_back.leave(microbatch, result.skips))
        return result

    def _forward_keeping_input(self, given: _ForwardCall) -> Produced:
        inputs, skips = tree.replace(Tensor, tree.apart, (given.inputs, dict(given.skips)))
        # The first layer may overwrite its input.
        own_inputs, own_skips = tree.replace(Tensor, _copied, (inputs, skips))
        with first_run_only(self._modules, self._layer_runs.formers) as past:
            own = replace(given, inputs=own_inputs, skips=own_skips)
            produced, _ = self._run(own, Keep.EVERYTHING, again=True)
        self._past[given.microbatch] = (replace(given, inputs=inputs, skips=skips), past)
        return produced

    def _run(
        self, given: _ForwardCall, keep: Keep, again: bool = False
    ) -> tuple[Produced, StageGraph]:
        """Run the layers on what was given, cut off from all graphs outside of the stage.

        ``again``: the whole stage will run again, so no layer needs to prepare for that.
        """
        wants = torch.is_grad_enabled()
        if wants and self._compiled is not None:
            return self._compiled.forward(
                given.microbatch, given.where[0], given.inputs, given.skips, given.criterion, keep
            )
        leaves, value = cut(given.inputs, wants and self._first_layer > 0)
        recalled = {key: cut(skip, wants) for key, skip in given.skips.items()}
        skips = {key: Skip.of(skip) for key, (_, skip) in recalled.items()}
        deferral = self._deferral(keep) if wants and not again else None
        with deferral or self._look():
            value, drew = self._run_layers(value, skips, given, again)
        left = {key: skip.taken(key) for key, skip in skips.items()}
        recalled_leaves = {key: skip_leaves for key, (skip_leaves, _) in recalled.items()}
        graph = MicrobatchGraph.of(
            leaves, recalled_leaves, value, left, drew, deferral, self._trained
        )
        stashed = {key: self._leaving(skip) for key, skip in left.items()}
        return Produced(self._leaving(value, given.criterion), stashed), graph

    def _leaving(self, value: Any, criterion: Criterion | None = None) -> Any:
        """A value for other stages, in memory that the next forward does not overwrite; or a loss,
        which goes to the caller."""
        if criterion is not None:
            # A scalar out of a fused loss can be a view that keeps a full-size tensor alive.
            return value.detach().clone()
        if type(value) is Tensor and value.requires_grad and torch.is_grad_enabled():
            return tree.apart(value)  # as nearly all do
        own = value
        if not all(tensor.requires_grad for tensor in tree.tensors(value)):
            own = apart_from_buffers(value, self._modules)
        return sent(own, self.index)

    def _seen(self, value: Any, criterion: Criterion | None) -> Any:
        """The output of the layers as others see it, a loss on parts of it if there is one."""
        if self._shared_output is None:
            return value
        shared = self._shared_output
        return shared.whole(value) if criterion is None else shared.for_loss(value)

    def _run_layers(
        self, value: Any, skips: dict[str, Skip], given: _ForwardCall, again: bool
    ) -> tuple[Any, bool]:
        """The output of the layers, and of the criterion; and whether any drew.

        Recalled skips leave ``skips``, stashed ones join it.
        """
        value, drew = self._layer_runs.run(value, skips, given.where, again)
        value = self._seen(value, given.criterion)
        if given.criterion is None:
            return value, drew
        index = self._criterion_index
        with self._streams.stream(index, True, *given.where) as stream:
            value = given.criterion(value)
        self._streams.learn(index, True, stream)
        return scalar(value, torch.is_grad_enabled()), drew or (stream is not None and stream.drew)
