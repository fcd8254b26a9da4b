"""``capture``: a model that names no spine becomes one that has one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.base.arguments import public
from penstock.base.errors import InputError, ModelError
from penstock.base.telling import tells
from penstock.base.values import one_of
from penstock.core.example import Dynamic, Example, Granularity
from penstock.engine.model import microbatches, tree
from penstock.engine.model.batches import plain
from penstock.engine.model.spine import run_spine, uncompiled
from penstock.engine.tracing.graphs import Traced, UntraceableError, trace
from penstock.engine.tracing.hidden import Whole
from penstock.engine.tracing.inputs import Borders, Given, borders_of, described, spread
from penstock.engine.tracing.layers import (
    CapturedLayer,
    adopt_the_rest,
    devices_of,
    dtypes_of,
    number_units,
    program_of,
)
from penstock.engine.tracing.proof import check_equal, explained, run_alone, with_other_rows
from penstock.engine.tracing.segments import (
    LayerNodes,
    ValueFlow,
    blocks_of,
    localise_sizes,
    must_follow,
    segments_of,
)
from penstock.engine.tracing.unseen import (
    Settings,
    attributes_kept,
    check_constants,
    check_draws,
    drawn_so_far,
    generators_of_python_kept,
)


@dataclass(frozen=True)
class _ModelTraces:
    """A model's graphs, from which its layers can be built in any order.

    Attributes:
        traced: the graphs, by whether the model was training.
        segments: the nodes of each layer, likewise; the same names in the same order.
        borders: how the model is called, and what it returns.
        settings: attributes whose values are in the graphs.
        example: the inputs of the trace, if a file can say them.
    """

    traced: dict[bool, Traced]
    segments: dict[bool, list[LayerNodes]]
    borders: Borders
    settings: Settings
    example: Example | None

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return [segment.name for segment in self.segments[True]]

    def flow(self, training: bool, order: Sequence[int]) -> ValueFlow:
        """The values that pass between the layers if they run in an order."""
        segments = self.segments[training]
        return ValueFlow(self.traced[training], [segments[index] for index in order])


class Captured(nn.Module):
    """A model cut into layers in execution order; made by ``capture``.

    It holds the model's own modules, parameters and buffers under the model's own names: training
    it trains the model, and either's ``state_dict`` is the other's. Switch modes (``train()``,
    ``eval()``) here, not at the model: which of two graphs a layer follows is its own mode.

    Attributes:
        original: the model.
        how: which tracer was used, and why the first was not.
        dtypes: those of parameters and buffers, as the graphs assume them.
    """

    how: str
    dtypes: tuple[torch.dtype, ...]

    def __init__(
        self, model: nn.Module, traces: _ModelTraces, how: str, order: Sequence[int]
    ) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[kind] = getattr(model, kind)
        self.__dict__["original"] = model
        self.how = how
        self._traces = traces
        self._order = tuple(order)
        self.dtypes = dtypes_of(model)
        # No child: its parameters would have a second name.
        self.__dict__["_layers"] = _layers(model, traces, self._order)
        self._tell_layers()

    def spine(self) -> list[CapturedLayer]:
        """The layers, in the order in which they run.

        Raises:
            ModelError: the model has been converted since it was captured, or attributes that are
                in its graphs have changed.
        """
        self.check_as_captured()
        if dtypes_of(self) != self.dtypes:
            raise ModelError(
                "parameters or buffers were converted to another dtype after the model was "
                "captured, which its graph does not know; capture it again"
            )
        devices = devices_of(self)
        if len(devices) == 1:  # else a pipeline has spread it, and told its layers
            for layer in self.__dict__["_layers"]:
                layer.compute_on(*devices)
        self._tell_layers()
        return list(self.__dict__["_layers"])

    def check_as_captured(self) -> None:
        """See that attributes that the model's code reads are what they were; a Pipeline asks
        before each call.

        Raises:
            ModelError: the layers would not notice that one has changed; names it.
        """
        self._traces.settings.check(self, self.__dict__["original"])
        self._tell_layers()  # its mode may have been switched at the model itself

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers; called as the model is, or with its inputs as one value."""
        if kwargs and args:
            bound = self._traces.borders.signature.bind(*args, **kwargs)
            inputs: Any = dict(bound.arguments)
        elif kwargs:
            inputs = kwargs
        else:
            inputs = args[0] if len(args) == 1 else args
        return run_spine(self.spine(), inputs)

    @property
    def training(self) -> bool:
        """The mode of the model."""
        original = self.__dict__.get("original")
        return original is None or bool(original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "original" in self.__dict__:
            self.__dict__["original"].training = mode

    def train(self, mode: bool = True) -> Self:
        """Switch the model and its layers to training mode, or out of it."""
        super().train(mode)
        self._tell_layers()
        return self

    def _tell_layers(self) -> None:
        for layer in self.__dict__["_layers"]:
            layer.training = self.training

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, in the order in which they run."""
        return tuple(self._traces.names[index] for index in self._order)

    @property
    def example(self) -> Example | None:
        """How the model was captured, for files; ``None`` if its inputs hold something that files
        do not have."""
        return self._traces.example

    @property
    def gives_loss(self) -> bool:
        """Whether what the model returns in training has a loss inside, under that name."""
        structure = self._traces.borders.outputs[True]
        output = tree.unflatten([0] * structure.num_leaves, structure)
        named = output.keys() if isinstance(output, Mapping) else getattr(output, "__dict__", ())
        return "loss" in named

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the arguments with which the model was captured."""
        borders = self._traces.borders
        args, kwargs = tree.unflatten(list(borders.leaves), borders.structure)
        return tuple(borders.signature.bind(*args, **kwargs).arguments)

    def ordered(self, names: Iterable[str]) -> Captured:
        """The same model with its layers in another order.

        Raises:
            InputError: these are not its layers, or one would run before what it reads.
        """
        wanted, own = list(names), self._traces.names
        if sorted(wanted) != sorted(own):
            odd = sorted({*wanted} ^ {*own}) or ["some twice"]
            raise InputError(
                f"an order must list every layer once; it differs in {', '.join(odd[:5])}"
            )
        order = [own.index(name) for name in wanted]
        place = {index: number for number, index in enumerate(order)}
        for training in (True, False):
            before = must_follow(self, self._traces.flow(training, range(len(own))))
            for index, earlier in enumerate(before):
                for other in earlier:
                    if place[other] > place[index]:
                        raise InputError(
                            f"layer {own[index]!r} cannot run before {own[other]!r}, whose result "
                            "it needs"
                        )
        return Captured(self.__dict__["original"], self._traces, self.how, order)


@tells("tracing the model")
@public()
def capture(
    model: nn.Module,
    inputs: Any,
    *,
    granularity: Granularity = "module",
    dynamic: Dynamic = "rows",
    verify: bool = True,
) -> Captured:
    """Cut a model that is no chain into layers, by tracing it.

    Modules without children stay whole and are called as they are, so hooks, dropout and running
    statistics work as ever; so do modules whose code no tracer can follow, such as a router that
    looks at values. What stands between two calls goes with the first. What a later layer reads is
    handed on by those between. The model is traced in training and in evaluation mode.

    Args:
        model: any module that ``torch.export`` or ``torch.fx`` can trace. It is not changed.
        inputs: one microbatch, rows first, as the pipeline will get it: a tuple is spread over the
            arguments of ``forward``, a dictionary over its keywords, if they fit.
        granularity: ``"module"``: a layer per call of a module; ``"block"``: one per entry of a
            list of modules (``nn.ModuleList``, ``nn.Sequential``), for fewer, larger layers.
        dynamic: which sizes of the inputs may differ later: the number of ``"rows"``, or ``"all"``.
        verify: run model and layers on ``inputs``, and on another number of rows, and compare.

    Returns:
        A module with a ``spine()``, for ``profile``, ``plan`` and ``Pipeline``.

    Raises:
        ModelError: it cannot be traced, its layers in the two modes do not match, it works for one
            number of rows only, or its layers do not give what it gives.
        InputError: inputs that ``forward`` does not take, or without rows.
    """
    return captured_in(_BOTH_MODES, model, inputs, granularity, dynamic, verify)


_BOTH_MODES = (True, False)


def captured_in(
    modes: Sequence[bool],
    model: nn.Module,
    inputs: Any,
    granularity: Granularity,
    dynamic: Dynamic,
    verify: bool,
) -> Captured:
    """As ``capture``; with ``(True,)`` as modes, one that only ever trains, in half of the time."""
    one_of("granularity", granularity, ("module", "block"))
    one_of("dynamic", dynamic, ("rows", "all"))
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, not an nn.Module")
    model = uncompiled(model)
    _check_python(model)
    inputs = plain(inputs, "inputs")
    _check_names(model)
    with _without_caches(model):
        return _captured(modes, model, inputs, granularity, dynamic, verify)


def _captured(
    modes: Sequence[bool],
    model: nn.Module,
    inputs: Any,
    granularity: Granularity,
    dynamic: Dynamic,
    verify: bool,
) -> Captured:
    signature = inspect.signature(model.forward)
    given = spread(signature, tree.replace(Tensor, _no_view, _at_least_two_rows(inputs)))
    whole = Whole(model, partial(_run_alone, model, given))
    with generators_of_python_kept():
        traced, how, settings = _traced_in_modes(modes, model, given, dynamic, whole, verify)
    segments = _segments(model, traced, granularity)
    guards = {mode: graph.guards for mode, graph in traced.items()}
    outputs = {mode: graph.output_structure for mode, graph in traced.items()}
    borders = borders_of(signature, given, dynamic, guards, outputs)
    example = described(inputs, granularity, dynamic)
    traces = _ModelTraces(traced, segments, borders, settings, example)
    captured = Captured(model, traces, how, range(len(traces.names)))
    if verify:
        for training in modes:
            with _in_mode(model, training):
                check_equal(model, captured, given, whole.calm)
    return captured


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Models of ``transformers`` return caches of keys and values by default, of which training
    makes no use, and which no graph can return."""
    configs = {id(config): config for config in _configs(model)}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations, of a model and of its parts, that ask for a cache."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            yield config


def _check_python(model: nn.Module) -> None:
    """See that a model's forward is code of Python."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule, whose code is not Python's, so it cannot be traced; give "
            "the module that torch.jit made it of"
        )


def _check_names(model: nn.Module) -> None:
    """See that a captured layer can hold what a model holds, by the model's own names.

    Raises:
        ModelError: the model has a name that layers have for something of their own.
    """
    own = {*dir(CapturedLayer), *CapturedLayer.__annotations__, "kind", "spine_name"}
    own -= {*dir(nn.Module)}
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in own:
            raise ModelError(
                f"{type(model).__name__}.{name} has a name that layers of captured models use for "
                "themselves; give it another name"
            )


def _run_alone(model: nn.Module, given: Given, other_rows: int) -> None:
    run_alone(model, with_other_rows(given) if other_rows else given)


def _traced_in_modes(
    modes: Sequence[bool],
    model: nn.Module,
    given: Given,
    dynamic: Dynamic,
    whole: Whole,
    verify: bool,
) -> tuple[dict[bool, Traced], str, Settings]:
    """The graphs of both modes, the first one's for one that is left out; which tracers made them,
    and the attributes that they were made with."""
    while True:
        traced: dict[bool, Traced] = {}
        tracers: dict[str, None] = {}
        settings, known = Settings(), len(whole.hidden)
        with attributes_kept(model, whole.calm):
            for training in modes:
                with _in_mode(model, training), settings.watching(model, whole.calm):
                    traced[training], how = _traced(model, given, dynamic, whole, verify)
                    tracers[how] = None
        if len(whole.hidden) == known:  # else layers of the two modes would not be the same
            break
    tracers.update(
        (f"{name} is called as it is, {line}", None) for name, line in whole.hidden.items()
    )
    return {True: traced[True], False: traced[modes[-1]]}, "; ".join(tracers), settings


def _traced(
    model: nn.Module, given: Given, dynamic: Dynamic, whole: Whole, verify: bool
) -> tuple[Traced, str]:
    before = drawn_so_far()
    try:
        traced = trace(model, given, dynamic, whole)
    except UntraceableError as failed:
        error = explained(model, given, failed)
        raise error from error.__cause__
    check_constants(type(model).__name__, traced[0].constants.values())
    if verify and drawn_so_far() != before:
        check_draws(type(model).__name__, lambda: run_alone(model, given), whole.calm)
    return traced


def _no_view(tensor: Tensor) -> Tensor:
    # An export asks of a view what it is a view of, which no other input has.
    if tensor._base is None:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _at_least_two_rows(inputs: Any) -> Any:
    # What has one row is traced as if there were never more.
    if microbatches.num_rows(inputs, "inputs") > 1:
        return inputs
    return tree.replace(Tensor, lambda tensor: torch.cat([tensor, tensor]), inputs)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    # A model that is in a mode need not have all of its modules in that mode.
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _segments(
    model: nn.Module, traced: dict[bool, Traced], granularity: Granularity
) -> dict[bool, list[LayerNodes]]:
    """The nodes of each layer in both modes: the same names in the same order."""
    training = segments_of(model, traced[True], granularity)
    if traced[False] is traced[True]:
        localise_sizes(traced[True], training)
        return {True: training, False: training}
    names = [segment.name for segment in training]
    evaluated = segments_of(model, traced[False], granularity, names)
    by_name = {segment.name: segment for segment in evaluated}
    if [name for name in names if name in by_name] != [segment.name for segment in evaluated]:
        raise ModelError(
            f"{type(model).__name__} runs its layers in another order in evaluation mode than in "
            "training, so no plan could serve both; give it a method `spine(self)`"
        )
    # A layer that only training runs hands everything on in evaluation.
    evaluation = [by_name.get(name, LayerNodes(name)) for name in names]
    for mode, segments in ((True, training), (False, evaluation)):
        localise_sizes(traced[mode], segments)
    return {True: training, False: evaluation}


def _layers(
    model: nn.Module, traces: _ModelTraces, order: Sequence[int]
) -> tuple[CapturedLayer, ...]:
    flows = {training: traces.flow(training, order) for training in (True, False)}
    layers = []
    for index, segment in enumerate(flows[True].segments):
        programs = {
            mode: program_of(traces.traced[mode], flow, index) for mode, flow in flows.items()
        }
        called = [str(node.target) for node in segment.nodes if node.op == "call_module"]
        kind = type(model.get_submodule(called[0])).__name__ if called else "function"
        end = (index == 0, index == len(order) - 1)
        layers.append(CapturedLayer(segment.name, kind, model, programs, traces.borders, end))
    adopt_the_rest(model, layers)
    number_units(layers, blocks_of(model, (layer.spine_name for layer in layers)))
    return tuple(layers)
