"""Exports that show what a pipeline needs: modules as calls, and writes where the code makes them.

A traced graph knows a model's operations, but no longer its modules: dropout and batch norm are
baked for one mode, hooks are gone, and nobody recognises ``addmm_17``. So modules that have no
children are kept as calls (``WholeModules``). While a model is exported, each of them stands behind
an operation that exists for this export only; the trace records it as one node, with the shapes
that it gives.

An export collects the writes into a model's buffers at the end, whatever the model does in between.
There they would be part of the last layer, which a pipeline may run elsewhere than the layer that
holds the buffer; and a value that is written there passes through all layers between, as if
gradients flowed through it. So they are moved to where the code makes them
(``write_buffers_early``).
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.engine.model import tree
from penstock.engine.model.experts import has_experts

_PLAIN = (
    Tensor, int, float, complex, bool, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool,
    torch.dtype, torch.device, torch.layout, torch.memory_format, slice, type(Ellipsis),
)  # fmt: skip
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def leaves_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that stay whole, by qualified name: those without children, torch's attention,
    whose only child is never called, and experts of mixtures, which ranks may divide."""
    leaves: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{leaf}.") for leaf in _parents(name) & leaves.keys())
        if name and not inside and (_is_leaf(module) or has_experts(module)):
            leaves[name] = module
    return leaves


def _parents(name: str) -> set[str]:
    atoms = name.split(".")
    return {".".join(atoms[:count]) for count in range(1, len(atoms))}


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False  # empty ones hand their input on
    children = {name for name, _ in module.named_children()}
    return children <= {"parametrizations"} or isinstance(module, nn.MultiheadAttention)


class OpaqueError(Exception):
    """A module takes or gives objects that hide their tensors, so it cannot be kept whole."""

    def __init__(self, name: str) -> None:
        super().__init__(f"module {name!r} passes objects whose tensors cannot be seen")
        self.name = name


class WholeCall:
    """One call of a module that stays whole.

    Args:
        forward: gives tensors like those that the module returns.
        given: the call's arguments, as ``(args, kwargs)``.

    Attributes:
        leaves: the arguments, flat; tensors and sizes stand for those of the trace.
        structure: the structure of ``(args, kwargs)``.
    """

    def __init__(self, name: str, forward: Callable[..., Any], given: Any) -> None:
        self.name = name
        self.leaves, self.structure = tree.flatten(given)
        self._forward = forward
        self._outputs: list[Any] = []
        self._output_structure: tree.Structure | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def sizes(self) -> list[Any]:
        """The numbers among the arguments that depend on the shapes of inputs."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.SymInt)]

    @property
    def places(self) -> list[int]:
        """The positions of tensors among the leaves of the module's output."""
        return [position for position, leaf in enumerate(self._outputs) if isinstance(leaf, Tensor)]

    @property
    def gives_one_tensor(self) -> bool:
        """Whether the module's output is a tensor itself."""
        return self._output_structure is not None and self._output_structure.is_leaf()

    def arguments(self, tensors: list[Any], sizes: list[Any]) -> Any:
        """The arguments as (args, kwargs), with these in the place of tensors and sizes."""
        ours, numbers = iter(tensors), iter(sizes)
        leaves = [
            next(ours)
            if isinstance(leaf, Tensor)
            else next(numbers)
            if isinstance(leaf, torch.SymInt)
            else leaf
            for leaf in self.leaves
        ]
        return tree.unflatten(leaves, self.structure)

    def run(self, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
        """Call the module on tensors without values; gives tensors like those that it returns."""
        args, kwargs = self.arguments(tensors, sizes)
        with torch.no_grad():  # only shapes are wanted, and without gradients they come sooner
            returned = self._forward(*args, **kwargs)
        self._outputs, self._output_structure = tree.flatten(returned)
        if not all(isinstance(leaf, _PLAIN) for leaf in self._outputs):
            raise OpaqueError(self.name)
        return [
            torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            for leaf in tree.tensors(self._outputs)
        ]

    def output(self, tensors: list[Tensor]) -> Any:
        """The value that the module returned, with these in the place of its tensors."""
        ours = iter(tensors)
        leaves = [next(ours) if isinstance(leaf, Tensor) else leaf for leaf in self._outputs]
        assert self._output_structure is not None
        return tree.unflatten(leaves, self._output_structure)


class WholeModules:
    """While active, calls of some modules go through an operation, so that traces show them.

    Args:
        modules: by their name in the model.
        hidden: by name, what gives, for each call, a function that returns tensors like those that
            the module would; of modules that cannot be called without values.

    Attributes:
        operation: the operation that traces show; its third argument is an index into ``calls``.
        calls: the calls so far.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        hidden: Mapping[str, Callable[[], Callable[..., Any]]],
    ) -> None:
        self.calls: list[WholeCall] = []
        self._modules = modules
        self._hidden = hidden
        # torch keeps no operation longer than its library, and knows none by that name before.
        space = f"penstock_{uuid.uuid4().hex}"
        library: Any = torch.library.Library  # which torch leaves untyped
        self._library = library(space, "FRAGMENT")
        self._library.define("module(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]")
        torch.library.register_fake(f"{space}::module", self._without_values, lib=self._library)
        self.operation: Any = getattr(torch.ops, space).module.default

    def _without_values(self, tensors: list[Tensor], sizes: list[Any], call: int) -> list[Tensor]:
        return self.calls[call].run(tensors, sizes)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context for tracing; hooks of these modules do not fire until the graph runs."""
        before = [(module, dict(module.__dict__)) for module in self._modules.values()]
        try:
            for name, module in self._modules.items():
                module.__dict__["forward"] = self._diverted(name, module)
                module.__dict__.update((hooks, OrderedDict()) for hooks in _HOOKS)
            yield
        finally:
            for module, attributes in before:
                module.__dict__.pop("forward", None)
                restored = {key: attributes[key] for key in _HOOKS}
                if "forward" in attributes:
                    restored["forward"] = attributes["forward"]
                module.__dict__.update(restored)

    def _diverted(self, name: str, module: nn.Module) -> Callable[..., Any]:
        forward, shapes = module.forward, _shapes_of(module)
        hidden = self._hidden.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made = WholeCall(name, hidden() if hidden else shapes, (args, kwargs))
            if not made.tensors or not _can_be_diverted(made):
                return forward(*args, **kwargs)
            self.calls.append(made)
            outputs = self.operation(made.tensors, made.sizes, len(self.calls) - 1)
            return made.output(outputs)

        return call


def _shapes_of(module: nn.Module) -> Callable[..., Any]:
    """A function that returns tensors like those that a module returns."""
    if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or not isinstance(module, nn.RNNBase):
        return module.forward
    # Without values these would still go through their sequence step by step, which takes minutes.
    forward = module.forward

    def returned(value: Any, hx: Any = None) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 3:
            return forward(value, hx)
        directions = 2 if module.bidirectional else 1
        width = module.proj_size or module.hidden_size
        rows = value.shape[0 if module.batch_first else 1]
        output = value.new_empty(*value.shape[:2], directions * width)
        last = value.new_empty(directions * module.num_layers, rows, width)
        if not isinstance(module, nn.LSTM):
            return output, last
        return output, (last, value.new_empty(*last.shape[:2], module.hidden_size))

    return returned


def _can_be_diverted(call: WholeCall) -> bool:
    # What a model runs without gradients or in its own precision, export puts into a graph of its
    # own, where modules cannot be called.
    kind = call.tensors[0].device.type
    ordinary = torch.is_grad_enabled() and not torch.is_autocast_enabled(kind)
    return ordinary and all(isinstance(leaf, _PLAIN) for leaf in call.leaves)


def write_buffers_early(graph: fx.Graph, model: nn.Module) -> None:
    """Put each write behind the value it writes, behind all that overwrites that value in place,
    and behind all that reads what the buffer was before.

    Args:
        graph: the model's graph; it is changed.
        model: tells which of the called modules may work in place.
    """
    for node in list(graph.nodes):
        if not _writes_back(node):
            continue
        buffer, value = node.args[:2]
        if _overwritten_by(value).target == buffer.target:
            graph.erase_node(node)  # done already, where the model does it
            continue
        order = {other: place for place, other in enumerate(graph.nodes)}
        overwriters = _overwriters(value, model)
        after = {value, buffer, *overwriters, *_readers(graph, str(buffer.target))} - {node}
        last = max(after, key=order.__getitem__)
        if order[last] < order[node]:
            last.append(node)


def _writes_back(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    buffer, value = node.args[:2]
    return isinstance(buffer, fx.Node) and buffer.op == "get_attr" and isinstance(value, fx.Node)


def _overwritten_by(value: fx.Node) -> fx.Node:
    """The value that in-place operations turned into this one."""
    while isinstance(value.target, torch._ops.OpOverload) and value.target._schema.is_mutable:
        source = value.args[0]
        if not isinstance(source, fx.Node):
            break
        value = source
    return value


def _readers(graph: fx.Graph, name: str) -> set[fx.Node]:
    """The nodes that may use a buffer, or a view of it."""
    readers = {
        node
        for node in graph.nodes
        if node.op == "call_module" and name.startswith(f"{node.target}.")
    }
    waiting = [node for node in graph.nodes if node.op == "get_attr" and node.target == name]
    while waiting:
        for user in set(waiting.pop().users) - readers:
            readers.add(user)
            if _may_be_a_view(user):
                waiting.append(user)
    return readers


def _overwriters(value: fx.Node, model: nn.Module) -> set[fx.Node]:
    """The nodes that may write into a value's memory: through it, its views, or what it views."""
    overwriters: set[fx.Node] = set()
    family, waiting = {value}, [value]
    while waiting:
        member = waiting.pop()
        overwriters.update(user for user in member.users if _writes_into(member, user, model))
        near = [user for user in member.users if _hands_on(user, model)]
        near += member.all_input_nodes if _hands_on(member, model) else []
        new = set(near) - family
        family |= new
        waiting.extend(new)
    return overwriters


def _hands_on(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node's output may share memory with its input."""
    if node.op == "call_module":
        # What computes with weights makes something new; Identity and dropout may not.
        return not any(True for _ in model.get_submodule(str(node.target)).parameters())
    return node.op == "call_function" and _may_be_a_view(node)


def _writes_into(value: fx.Node, user: fx.Node, model: nn.Module) -> bool:
    if user.op == "call_module":
        return getattr(model.get_submodule(str(user.target)), "inplace", False) is True
    if isinstance(user.target, torch._ops.HigherOrderOperator):
        return True  # a graph within the graph, such as what runs without gradients
    if not isinstance(user.target, torch._ops.OpOverload) or _writes_back(user):
        return False
    # Some overwrite a list of tensors.
    return any(
        given is value or (isinstance(given, list) and value in given)
        for given in written_arguments(user, user.target)
    )


def written_arguments(node: fx.Node, operation: torch._ops.OpOverload) -> list[Any]:
    """The arguments of a node that its operation writes into."""
    return [
        given
        for given, argument in zip(node.args, operation._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def gives_alias(operation: torch._ops.OpOverload) -> bool:
    """Whether what an operation gives may share memory with what it is given."""
    return any(result.alias_info is not None for result in operation._schema.returns)


def _may_be_a_view(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or gives_alias(node.target)
