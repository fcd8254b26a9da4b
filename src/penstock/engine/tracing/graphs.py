"""Tracing a model: ``torch.export`` first, ``torch.fx`` if that fails.

Where an export fails, torch prints whole graphs; our error says what matters. ``sys.stderr``
belongs to all threads, so it stays as it is. The module of torch that prints the graph is given a
``print`` of its own while anybody exports; it leaves out the graphs of those threads that asked for
it (``without_dumps``).
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.base.errors import ModelError
from penstock.core.example import Dynamic
from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model import tree
from penstock.engine.model.spine import state_of
from penstock.engine.tracing.exports import OpaqueError, WholeModules, write_buffers_early
from penstock.engine.tracing.hidden import Whole
from penstock.engine.tracing.inputs import Given
from penstock.engine.tracing.lines import TraceFailure, asks_its_mask, causes_of, lines_of

_WARNS = "torch.fx.experimental.symbolic_shapes"
_COMPLAINS = "torch._subclasses.fake_tensor"
"""Logs whole tracebacks of errors, which our own error has as its cause."""

_LOCK = threading.Lock()
_HUSHED: Counter[int] = Counter()
"""How often each thread is inside ``without_dumps``; the last to leave restores what is shared."""


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """While active, the graph that ``torch.export`` prints with an error in this thread is not
    shown, nor what it logs about sizes and tensors without values. All else is written as ever,
    also by other threads."""
    # It takes a second, and only who captures a model needs it.
    import torch.export._trace as prints

    thread = threading.get_ident()

    def lets_through(record: logging.LogRecord) -> bool:
        most = logging.ERROR if record.name == _COMPLAINS else logging.WARNING
        return record.thread != thread or record.levelno > most

    loggers = [logging.getLogger(name) for name in (_WARNS, _COMPLAINS)]
    for logger in loggers:
        logger.addFilter(lets_through)
    with _LOCK:
        _HUSHED[thread] += 1
        vars(prints)["print"] = _print
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(lets_through)
        with _LOCK:
            _HUSHED.subtract([thread])
            if not _HUSHED[thread]:
                del _HUSHED[thread]
            if not _HUSHED:
                del vars(prints)["print"]


def _print(*values: Any, **options: Any) -> None:
    dump = getattr(sys.exc_info()[1], "partial_fx_graph", None)
    is_dump = dump is not None and any(value is dump for value in values)
    if not is_dump or threading.get_ident() not in _HUSHED:
        builtins.print(*values, **options)  # noqa: T201 - torch's own words


_EXPORTING = threading.RLock()
"""torch keeps what it exports in globals; two exports at a time fail in one of the threads."""


class UntraceableError(Exception):
    """No tracer could follow a model.

    Attributes:
        exported: what ``torch.export`` said.
        symbolic: what ``torch.fx`` said.
    """

    def __init__(self, exported: Exception, symbolic: Exception) -> None:
        super().__init__(f"{short(exported)}; {short(symbolic)}")
        self.exported = exported
        self.symbolic = symbolic


@dataclass(frozen=True)
class Traced:
    """A model as a graph, for one mode.

    Attributes:
        graph: one placeholder for each leaf of ``(args, kwargs)``; modules without children are
            called; the output is a flat list.
        constants: what the graph reads and the model does not hold.
        output_structure: the structure of what the model returns.
        guards: raises unless the inputs have shapes that the graph is for; ``None`` where torch
            gives no such check.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    output_structure: tree.Structure
    guards: Callable[..., Any] | None


def trace(model: nn.Module, given: Given, dynamic: Dynamic, whole: Whole) -> tuple[Traced, str]:
    """Trace a model in its current mode; gives the graph and which tracer made it.

    Args:
        whole: the modules that stay whole; where no tracer can follow the code of another, that one
            stays whole as well.

    Raises:
        UntraceableError: no tracer can.
    """
    failed: UntraceableError | None = None
    while True:
        try:
            return _exported(model, given, dynamic, whole), "torch.export"
        except Exception as error:
            first = error
        try:
            how = f"torch.fx, because torch.export failed: {short(first)}"
            return _symbolic(model, given, whole), how
        except Exception as second:
            # What failed before anything was hidden says most of the model.
            failed = failed or UntraceableError(first, second)
        has_a_remedy = asks_its_mask(TraceFailure(model, first, lines_of(first)))
        if has_a_remedy or not whole.hide_what_failed(first):
            raise failed from failed.exported


def short(error: BaseException) -> str:
    """An error in a line: its class and the beginning of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return f"{type(error).__name__}: {said[:200]}"


def _exported(model: nn.Module, given: Given, dynamic: Dynamic, whole: Whole) -> Traced:
    modules = whole.modules
    while True:
        seen = whole.seen()
        hidden = {name: partial(seen.next_call, name) for name in whole.hidden}
        try:
            return _export(model, given, dynamic, WholeModules(modules, hidden))
        except Exception as error:
            hiding = _opaque(error)
            if hiding is None:
                raise
            modules = {name: module for name, module in modules.items() if name != hiding}


def _opaque(error: BaseException) -> str | None:
    causes = (cause.name for cause in causes_of(error) if isinstance(cause, OpaqueError))
    return next(causes, None)


def _export(model: nn.Module, given: Given, dynamic: Dynamic, whole: WholeModules) -> Traced:
    args, kwargs = given
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree.tensors(given):
        if tensor.dim():
            count = tensor.dim() if dynamic == "all" else 1
            shapes[tensor] = dict.fromkeys(range(count), torch.export.Dim.AUTO)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind in {tensor.device.type for tensor in tree.tensors(given)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(whole.active())
        stack.enter_context(without_dumps())
        # Warnings that a model assigns attributes while it is exported; parameters are put back.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with _EXPORTING:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    module = program.module()
    _check_nested(module, whole)
    guards = _take_guards(module)
    _restore_calls(module.graph, whole)
    write_buffers_early(module.graph, model)
    _drop_idle(module.graph)
    structure = program.call_spec.out_spec
    assert structure is not None
    return Traced(module.graph, _constants(module, model), structure, guards)


def _check_nested(module: Any, whole: WholeModules) -> None:
    """See that no module is called in a graph within the graph, where it cannot be.

    Raises:
        OpaqueError: names one that is, so that it is looked into.
    """
    for name, inner in module.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and node.target is whole.operation:
                    raise OpaqueError(whole.calls[node.args[2]].name)


def _take_guards(module: Any) -> Callable[..., Any] | None:
    """Newer versions of torch check shapes inside the graph; we do so before its first layer."""
    guards: Callable[..., Any] | None = getattr(module, "_guards_fn", None)
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
    return guards


def _restore_calls(graph: fx.Graph, whole: WholeModules) -> None:
    """Put calls of modules in the place of the operations that stood for them."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not whole.operation:
            continue
        tensors, sizes, number = node.args
        call = whole.calls[number]
        args, kwargs = call.arguments(list(tensors), list(sizes))
        with graph.inserting_before(node):
            made = graph.create_node("call_module", call.name, args, kwargs)
            # The stack names the module itself last; what encloses it is what matters here.
            made.meta = {"nn_module_stack": node.meta.get("nn_module_stack", {})}
            source = made
            if not call.gives_one_tensor:
                source = graph.create_node("call_function", leaves_of_output, (made,))
        for user in list(node.users):
            if call.gives_one_tensor:
                made.meta["val"] = user.meta.get("val")
                user.replace_all_uses_with(made)
                graph.erase_node(user)
            else:
                user.args = (source, call.places[user.args[1]])
        graph.erase_node(node)


def leaves_of_output(value: Any) -> list[Any]:
    """The leaves of what a module returned; graphs call it."""
    return tree.flatten(value)[0]


def _drop_idle(graph: fx.Graph) -> None:
    """Remove nodes that nobody reads and that neither draw nor write nor check."""
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_idle(node):
            graph.erase_node(node)


def _is_idle(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True  # it would forbid autocast
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") == "_operator"
    schema, tags = node.target._schema, node.target.tags
    draws = torch.Tag.nondeterministic_seeded in tags
    return bool(schema.returns) and not schema.is_mutable and not draws


def _constants(module: nn.Module, model: nn.Module) -> dict[str, Any]:
    """The values that a graph reads and that are neither parameters nor buffers of the model."""
    state = {name for name, _ in state_of(model)}
    constants: dict[str, Any] = {}
    for node in module.graph.nodes:  # type: ignore[union-attr]
        if node.op == "get_attr" and node.target not in state:
            value: Any = module
            for atom in node.target.split("."):
                value = getattr(value, atom)
            constants[node.target] = value
    return constants


class _LeafTracer(fx.Tracer):
    """Keeps the same modules whole as an export does, and takes nested inputs."""

    def __init__(self, given: Given, whole: Whole) -> None:
        super().__init__()
        self._whole = {id(module) for module in whole.modules.values()}
        self._leaves, self._structure = tree.flatten(given)
        self.output_structure: tree.Structure | None = None

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return id(module) in self._whole

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        inputs: list[Any] = []
        for position, leaf in enumerate(self._leaves):
            proxy = self.create_proxy("placeholder", f"input_{position}", (), {})
            inputs.append(proxy if isinstance(leaf, Tensor) else leaf)
        args, kwargs = tree.unflatten(inputs, self._structure)

        def run(root: nn.Module) -> list[Any]:
            outputs, self.output_structure = tree.flatten(root.forward(*args, **kwargs))
            return outputs

        return run, [self.root]


def _symbolic(model: nn.Module, given: Given, whole: Whole) -> Traced:
    tracer = _LeafTracer(given, whole)
    with torch.enable_grad(), _buffers_in_place(model), generators_kept(()):
        before = torch.get_rng_state()
        graph = tracer.trace(model)
        if not torch.equal(before, torch.get_rng_state()):
            raise ModelError("forward draws random numbers, which torch.fx would keep for ever")
    _drop_idle(graph)
    structure = tracer.output_structure
    assert structure is not None
    return Traced(graph, _constants(_owner(model, graph), model), structure, None)


@contextmanager
def _buffers_in_place(model: nn.Module) -> Iterator[None]:
    """Put buffers back that a forward has assigned while it was traced.

    Raises:
        ModelError: it has; the graph knows nothing of that.
    """
    before = [
        (prefix, module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    assigned = []
    try:
        yield
    finally:
        for prefix, module, name, buffer in before:
            if getattr(module, name, None) is not buffer:
                assigned.append(f"{prefix}.{name}" if prefix else name)
                module._buffers[name] = buffer
    if assigned:
        raise ModelError(
            f"forward assigns the buffer{'s' * (len(assigned) > 1)} {', '.join(assigned)}, which "
            "torch.fx does not see; write into the buffer with copy_ instead"
        )


def _owner(model: nn.Module, graph: fx.Graph) -> nn.Module:
    # Tensors made while tracing are left as attributes of the model.
    module = fx.GraphModule(model, graph)
    for name in [name for name in vars(model) if name.startswith("_tensor_constant")]:
        delattr(model, name)
    return module
