"""What of a captured layer a member runs, and where its values lie (``recorded_writer``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

from torch import fx, nn

from penstock.base.errors import ModelError
from penstock.engine.following.dims import shape_of
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.layouts import SEQUENCE, WHOLE, Layout, Layouts
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.recorded_writer import (
    ALL_WHOLE,
    MemberGraphWriter,
    RecordedLayouts,
)
from penstock.engine.tracing.layers import CapturedLayer


def for_member(
    recorded: fx.Graph,
    module: Callable[[str], nn.Module],
    ways: Mapping[str, ModuleSharing],
    group: TensorGroup,
    layouts: RecordedLayouts | None = None,
) -> fx.Graph:
    """The graph that a member runs in the place of a recorded one.

    Args:
        recorded: with the shapes that values had.
        module: the module of a name in the graph.
        ways: how modules are shared, by their names.
        layouts: in which it reads its values and gives them; by default all are whole.

    Raises:
        ModelError: shapes are not known, or a part would be written into.
    """
    return MemberGraphWriter(recorded, module, ways, group, layouts or ALL_WHOLE).write()


def layouts_of(
    layer: CapturedLayer,
    ways: Mapping[str, ModuleSharing],
    size: int,
    have: Layouts,
    *,
    by_positions: bool,
    keeps: Layout,
) -> RecordedLayouts:
    """Where values lie in a captured layer that members share.

    Args:
        ways: how modules in it are shared, by their names.
        size: how many members there are.
        have: how its values come.
        by_positions: whether those that come by positions are read so, and what rows give lies so.
        keeps: the layout in which values leave that lie so; others leave whole.

    Raises:
        ModelError: its code does not say how many positions there are, or differs in the values
            that it takes and gives between training and evaluation.
    """
    training, evaluation = layer.recorded(True), layer.recorded(False)
    if _ends(training) != _ends(evaluation):
        raise ModelError(
            "its code takes or gives other values in evaluation than in training, so parts of them "
            "cannot be told apart; leave this split out"
        )
    reads: Layouts = WHOLE
    if by_positions and isinstance(have, tuple) and SEQUENCE in have:
        reads = tuple(layout if layout == SEQUENCE else WHOLE for layout in have)
    asked = RecordedLayouts(reads, WHOLE, by_positions)
    member = cast(TensorGroup, SimpleNamespace(size=size, index=0))
    writer = MemberGraphWriter(
        training, layer.get_submodule, ways, member, asked, decides=True, keeps=keeps
    )
    writer.write()
    return asked._replace(
        gives=tuple(writer.gives),
        rows=frozenset(writer.rows),
        terms=frozenset(writer.terms),
        asks_for_no_values=frozenset(writer.uses_none),
        gathers=writer.num_gathers,
    )


def _ends(graph: fx.Graph) -> list[int]:
    """How many dimensions each value has that a graph takes, or gives; -1 for what is no tensor."""
    *_, output = graph.nodes
    values = [node for node in graph.nodes if node.op == "placeholder"]
    shapes = [
        shape_of(value) if isinstance(value, fx.Node) else None
        for value in (*values, None, *output.args[0])
    ]
    return [-1 if shape is None else len(shape) for shape in shapes]
