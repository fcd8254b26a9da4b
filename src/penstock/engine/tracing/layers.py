"""The layers of a traced model as modules: code for each mode, and the model's own parameters.

A captured layer may be a single batch norm. Its input is all that it would keep anyway, and
recomputing it costs time for nothing. So the layers of a block are recomputed as one
(``RecomputedTogether``): between them nothing is kept. A block is an entry of a list of modules, as
with ``granularity="block"``; outside of lists, and for what has no weight matrix of its own (norms,
activations, pools), layers go with those before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from penstock.engine.model import tree
from penstock.engine.model.replay import Run
from penstock.engine.model.spine import state_of
from penstock.engine.tracing.digests import digest_of, lines_of_constants, lines_of_graph
from penstock.engine.tracing.graphs import Traced
from penstock.engine.tracing.inputs import Borders
from penstock.engine.tracing.segments import ValueFlow, called

_COMPUTES_ON = "computes_on"
"""The attribute of a layer that its code reads where the model's code named a device."""


@dataclass(frozen=True)
class LayerProgram:
    """The program of a layer in one mode.

    Attributes:
        run: from (layer, values) to the values behind the layer; in the last layer, the leaves of
            what the model returns.
        modules: names of the modules that the layer calls.
        state: names of the parameters and buffers that it reads besides.
        constants: what it reads that the model does not hold.
        reads: names of the earlier layers whose tensors it reads.
        produces: positions in its output of what it makes itself.
        readers: for every position of its output, the name of the last layer that reads it; the
            last layer's own name.
        num_inputs: how many values live before it.
        uses: positions among its inputs of what it computes with; ``None`` in the first and last
            layer, whose values are those of the model.
        hands_on: for every position of its output, the position of the same value among its
            inputs, or ``None`` for what it makes.
        graph: what ``run`` was made of, with the shapes of its values where they are known.
    """

    run: Callable[..., Sequence[Any]]
    modules: frozenset[str]
    state: frozenset[str]
    constants: Mapping[str, Any]
    reads: tuple[str, ...]
    produces: tuple[int, ...]
    readers: tuple[str, ...]
    num_inputs: int
    uses: tuple[int, ...] | None
    hands_on: tuple[int | None, ...]
    graph: fx.Graph

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # never changes, and its function belongs to no layer

    def lines(self) -> Iterable[str]:
        """All that counts, in a text that is equal wherever the same was traced."""
        yield from lines_of_graph(self.graph)
        yield from lines_of_constants(self.constants)
        yield f"{self.reads} {self.produces} {self.readers} {self.num_inputs}"
        yield f"{self.uses} {self.hands_on}"


def program_of(traced: Traced, flow: ValueFlow, index: int) -> LayerProgram:
    """Make the program of the layer at an index of a flow."""
    last = index == len(flow.segments) - 1
    names = [segment.name for segment in flow.segments]
    given = flow.inputs if index == 0 else flow.live[index - 1]
    wanted = flow.outputs if last else flow.live[index]
    graph = _graph(flow, index, given, wanted)
    read = set(flow.reads(index))
    places = {value: place for place, value in enumerate(given)}
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return LayerProgram(
        run=_compiled(graph),
        modules=frozenset(str(node.target) for node in graph.nodes if node.op == "call_module"),
        state=frozenset(targets - traced.constants.keys() - {_COMPUTES_ON}),
        constants={name: traced.constants[name] for name in targets & traced.constants.keys()},
        reads=tuple(names[source] for source in flow.sources(index)),
        produces=tuple(
            place
            for place, value in enumerate(wanted)
            if isinstance(value, fx.Node) and flow.maker.get(value, -1) == index
        ),
        readers=tuple(names[index if last else flow.last_reader[value]] for value in wanted),
        num_inputs=len(given),
        uses=None
        if last or index == 0
        else tuple(places[value] for value in given if value in read),
        hands_on=tuple(
            places.get(value) if isinstance(value, fx.Node) else None for value in wanted
        ),
        graph=graph,
    )


def _graph(
    flow: ValueFlow, index: int, given: Sequence[fx.Node], wanted: Sequence[Any]
) -> fx.Graph:
    graph = fx.Graph()
    ours: dict[fx.Node, fx.Node] = {}
    for position, value in enumerate(given):
        ours[value] = graph.placeholder(f"value_{position}")
        ours[value].meta = dict(value.meta)

    def own(node: fx.Node) -> fx.Node:
        if node not in ours:  # what the model holds is read where it is needed
            assert node.op == "get_attr", node
            ours[node] = graph.create_node("get_attr", node.target)
            ours[node].meta = dict(node.meta)
        return ours[node]

    def own_or_here(value: Any) -> Any:
        """A node's own twin; for the device of the trace, that on which the layer computes."""
        if isinstance(value, torch.device):
            return graph.create_node("get_attr", _COMPUTES_ON)
        return own(value) if isinstance(value, fx.Node) else value

    for node in flow.segments[index].nodes:
        args = fx.node.map_aggregate(node.args, own_or_here)
        kwargs = fx.node.map_aggregate(node.kwargs, own_or_here)
        ours[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        ours[node].meta = dict(node.meta)
    graph.output(fx.node.map_arg(list(wanted), own))
    return graph


def _compiled(graph: fx.Graph) -> Callable[..., Sequence[Any]]:
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<layer of a captured model>", "exec"), space)
    run: Callable[..., Sequence[Any]] = space["forward"]
    return run


class _Scope(nn.Module):
    """Stands for a module of the model that a layer holds only parts of."""


class CapturedLayer(nn.Module):
    """One layer of a captured model.

    Takes the tuple of values that live before it (the first: the model's inputs) and returns the
    tuple of those that live behind it (the last: what the model returns). It holds the model's own
    modules and parameters, under their names in the model.

    Attributes:
        spine_name: its name among the layers.
        kind: the class of the module that it calls first; ``"function"`` if none.
        reads: names of the earlier layers whose tensors it reads; what it reads of the model's own
            inputs is not told here.
        produces: positions, among the leaves of its output, of what it made itself; the others are
            handed on.
        readers: for each position, the name of the last layer that reads it; its own for what the
            model returns.
        unit: equal for layers that are recomputed together.
        computes_on: the device on which it makes new tensors.
    """

    unit: int
    computes_on: torch.device
    _programs: dict[bool, LayerProgram]
    _borders: Borders
    _end: tuple[bool, bool]

    def __init__(
        self,
        name: str,
        kind: str,
        model: nn.Module,
        programs: Mapping[bool, LayerProgram],
        borders: Borders,
        end: tuple[bool, bool],
    ) -> None:
        super().__init__()
        self.spine_name = name
        self.kind = kind
        self.unit = 0
        self.computes_on = next((t.device for _, t in state_of(model)), torch.device("cpu"))
        self._programs = dict(programs)
        self._borders = borders
        self._end = end
        both = programs.values()
        for module in sorted({name for program in both for name in program.modules}):
            self._scope(module).add_module(_last(module), model.get_submodule(module))
        for state in sorted({name for program in both for name in program.state}):
            self.adopt(model, state)
        for key, value in {k: v for program in both for k, v in program.constants.items()}.items():
            # Neither state of the model nor a module of it.
            self._scope(key).__dict__[_last(key)] = value

    @property
    def calls(self) -> frozenset[str]:
        """Names of the modules that it calls, in either mode."""
        return frozenset().union(*(program.modules for program in self._programs.values()))

    @property
    def traced_as(self) -> str:
        """A digest of what was recorded, for processes to compare."""
        programs = (self._programs[mode] for mode in (True, False))
        return digest_of(line for program in programs for line in program.lines())

    def recorded(self, training: bool) -> fx.Graph:
        """What was recorded in a mode, with the shapes of values where they are known."""
        return self._programs[training].graph

    def rewrite(self, write: Callable[[fx.Graph], fx.Graph]) -> None:
        """Do what ``write`` makes of what was recorded, in both modes."""
        self._programs = {
            mode: replace(program, run=_compiled(write(program.graph)))
            for mode, program in self._programs.items()
        }

    @property
    def message_types(self) -> set[type]:
        """The classes that its output is made of."""
        if not self._end[1]:
            return set()
        return set().union(*map(tree.classes, self._borders.outputs.values()))

    def adopt(self, model: nn.Module, key: str) -> None:
        """Hold a parameter or buffer of the model, if no module held does so already."""
        scope = self._scope(key)
        name = _last(key)
        owner = model.get_submodule(key.rpartition(".")[0])
        if not isinstance(scope, _Scope | CapturedLayer) or name in {
            *scope._parameters,
            *scope._buffers,
        }:
            return
        if name in owner._parameters:
            scope.register_parameter(name, owner._parameters[name])
        else:
            persistent = name not in owner._non_persistent_buffers_set
            scope.register_buffer(name, owner._buffers[name], persistent=persistent)

    def compute_on(self, device: torch.device) -> None:
        """Let the layer's code make its tensors on a device, to which what the layer holds of the
        model is moved by others; its constants are moved here. On ``meta`` nothing is computed, and
        constants would lose their values."""
        if device == self.computes_on or device.type == "meta":
            return
        self.computes_on = device
        for program in self._programs.values():
            for key in program.constants:
                held = self._scope(key).__dict__
                held[_last(key)] = tree.replace(
                    Tensor, lambda constant: constant.to(device), held[_last(key)]
                )

    def _scope(self, key: str) -> nn.Module:
        module: nn.Module = self
        for atom in key.split(".")[:-1]:
            if atom not in module._modules:
                module.add_module(atom, _Scope())
            child = module._modules[atom]
            assert child is not None
            module = child
        return module

    @property
    def program(self) -> LayerProgram:
        """The program of the layer in its mode."""
        return self._programs[self.training]

    @property
    def reads(self) -> tuple[str, ...]:
        """See the class."""
        return self.program.reads

    @property
    def produces(self) -> tuple[int, ...]:
        """See the class."""
        return self.program.produces

    @property
    def readers(self) -> tuple[str, ...]:
        """See the class."""
        return self.program.readers

    def forward(self, values: Any) -> Any:
        """Run the layer."""
        first, last = self._end
        if first:
            values = self._borders.flat(values, self.training)
        outputs = self.program.run(self, *values)
        if last:
            return tree.unflatten(list(outputs), self._borders.outputs[self.training])
        return tuple(outputs)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def adopt_the_rest(model: nn.Module, layers: Sequence[CapturedLayer]) -> None:
    """Let the layer nearest by name hold state that no layer uses, so that checkpoints have it."""
    held = {name: layer for layer in layers for name, _ in state_of(layer)}
    holders = {id(tensor): layer for layer in layers for _, tensor in state_of(layer)}
    for name, tensor in state_of(model):
        if name not in held:
            nearest = max(held, key=lambda other: _shared_atoms(name, other), default=None)
            layer = holders.get(id(tensor)) or (held[nearest] if nearest else layers[0])
            layer.adopt(model, name)


def _shared_atoms(name: str, other: str) -> int:
    """How many leading parts two qualified names have in common."""
    count = 0
    for ours, theirs in zip(name.split("."), other.split("."), strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def dtypes_of(model: nn.Module) -> tuple[torch.dtype, ...]:
    """The dtypes of a model's parameters and buffers, which a trace assumes."""
    return tuple(tensor.dtype for _, tensor in state_of(model))


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where a model's parameters and buffers are."""
    return {tensor.device for _, tensor in state_of(model)}


def number_units(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> None:
    """Set ``unit`` of each layer: equal for layers that are recomputed together.

    Args:
        layers: all layers of a captured model, in execution order.
        blocks: the name of each layer's block.
    """
    unit = -1
    for own in _runs(layers, blocks):
        unit += 1 if unit < 0 or any(map(_weighs, own)) else 0
        for layer in own:
            layer.unit = unit


def _runs(layers: Sequence[CapturedLayer], blocks: Sequence[str]) -> Iterator[list[CapturedLayer]]:
    """Split layers into runs of one block; where the block is called again, another run begins."""
    for _, group in itertools.groupby(zip(layers, blocks, strict=True), itemgetter(1)):
        own: list[CapturedLayer] = []
        met: set[str] = set()
        for layer, _ in group:
            name = called(layer.spine_name)
            if name in met and _weighs(layer):
                yield own
                own, met = [], set()
            own.append(layer)
            met.add(name)
        yield own


def _weighs(layer: CapturedLayer) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters())


class RecomputedTogether:
    """Consecutive layers that are recomputed as one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._paths: dict[tuple[bool, ...], dict[int, int]] = {}

    def beside(self, run: Run) -> Run:
        """Make a run that is not given what the layers only hand on, so that nobody keeps it.

        Args:
            run: runs the layers.
        """

        def run_the_rest(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
            path = self._path()
            if not path:
                return run(value, recalled)
            passing = set(path.values())
            rest = tuple(None if k in passing else leaf for k, leaf in enumerate(value))
            output, drew, stashed = run(rest, recalled)
            whole = (value[path[k]] if k in path else leaf for k, leaf in enumerate(output))
            return tuple(whole), drew, stashed

        return run_the_rest

    def _path(self) -> dict[int, int]:
        modes = tuple(module.training for module in self.modules)
        if modes not in self._paths:
            self._paths[modes] = _handed_on(self.modules)
        return self._paths[modes]


def units_of(modules: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """(start, stop) of layers that are recomputed together; one that is not captured is alone."""
    keys = [
        ("captured", module.unit) if isinstance(module, CapturedLayer) else ("alone", index)
        for index, module in enumerate(modules)
    ]
    groups = [list(group) for _, group in itertools.groupby(range(len(keys)), keys.__getitem__)]
    return [(group[0], group[-1] + 1) for group in groups]


def _handed_on(modules: Sequence[nn.Module]) -> dict[int, int]:
    """For each value that layers hand on untouched in their modes: its position in their output,
    and as the dictionary's value that in their input."""
    programs = [module.program for module in modules if isinstance(module, CapturedLayer)]
    if len(programs) < len(modules) or any(program.uses is None for program in programs):
        return {}
    origins: list[int | None] = list(range(programs[0].num_inputs))
    used: set[int | None] = set()
    for program in programs:
        used.update(origins[position] for position in program.uses or ())
        origins = [None if position is None else origins[position] for position in program.hands_on]
    return {
        position: origin
        for position, origin in enumerate(origins)
        if origin is not None and origin not in used
    }
