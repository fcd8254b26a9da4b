"""The passes of a stage as functions: its forward, and its backward whole or in two halves.

The forward hands on to the backward what that needs, as autograd would save it. Weights are read
when a pass runs, so which version of them a pass sees is for others to say; of buffers, a backward
sees what the forward has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, fx

from penstock.engine.stage.backends import Backend
from penstock.engine.stage.pass_compilers import Run, compiled
from penstock.engine.stage.stage_function import ResultParts, StageSlots, TensorSlot
from penstock.engine.tracing.graph_parts import GraphPart, parts_of
from penstock.engine.tracing.joint import ONE_AT_A_TIME, JointGraph, origin_of


class ForwardPass(NamedTuple):
    """F.

    Attributes:
        run: of what it takes; gives results, new values of buffers, and what is kept.
        takes: which of the tensors that the stage is given.
        slots: where it reads weights and buffers, which it takes behind that.
        num_results: how many of what it gives are results.
        writes: the buffers whose new values follow, and whether they are put in their place.
        keeps: which of the tensors that the stage is given are kept for later passes.
        keeps_buffers: likewise of buffers, and whether as copies, since it writes them.
    """

    run: Run
    takes: tuple[int, ...]
    slots: tuple[TensorSlot, ...]
    num_results: int
    writes: tuple[tuple[TensorSlot, bool], ...]
    keeps: tuple[int, ...]
    keeps_buffers: tuple[tuple[TensorSlot, bool], ...]

    def perform(self, given: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        """(results, what later passes need)."""
        kept = [given[place] for place in self.keeps]
        for slot, overwritten in self.keeps_buffers:
            kept.append(slot.now.clone() if overwritten else slot.now)
        taken = [given[place] for place in self.takes]
        for slot in self.slots:
            taken.append(slot.holder[slot.name])
        made = self.run(taken)
        end = self.num_results + len(self.writes)
        for (slot, is_replaced), value in zip(self.writes, made[self.num_results :], strict=False):
            if is_replaced:
                slot.holder[slot.name] = value
            else:
                slot.now.copy_(value)
        kept.extend(made[end:])
        return made[: self.num_results], kept


class BackwardPass(NamedTuple):
    """B, I or W.

    Attributes:
        run: of what it takes.
        takes: which of what is there for it.
        slots: where it reads weights, which it takes behind that.
        num_results: how many of what it gives are gradients; the rest is for the next pass.
        leaves: which of what is there for it the next pass needs.
    """

    run: Run
    takes: tuple[int, ...]
    slots: tuple[TensorSlot, ...]
    num_results: int
    leaves: tuple[int, ...]

    def perform(self, there: list[Tensor]) -> tuple[Sequence[Tensor | None], list[Tensor]]:
        """(gradients, what the next pass needs); ``there`` is emptied."""
        left = [there[place] for place in self.leaves]
        taken = [there[place] for place in self.takes]
        there.clear()
        for slot in self.slots:
            taken.append(slot.holder[slot.name])
        made = self.run(taken)
        left.extend(made[self.num_results :])
        return made[: self.num_results], left


class StagePasses(NamedTuple):
    """F and what follows it: B, or I and W.

    Attributes:
        forward: F.
        back: B, or I; its gradients are those of what the stage is given, and behind them, of B,
            those of weights.
        weights: W, if backwards are split.
    """

    forward: ForwardPass
    back: BackwardPass
    weights: BackwardPass | None


class TracedPasses:
    """What a joint graph is cut into, compiled where it is first asked for.

    Args:
        joint: of the stage's parameters, its buffers, and what it is given, in this order.
        state: where the first two are held.
        made: what its results are parts of.
        backend: what compiles.
        recompute: whether the forward keeps no more than what its results end with, the inputs of
            layers.

    Attributes:
        trained: slots of the parameters that get gradients.
        depends: by place among the gradients of B, of the gradients that come back which it
            depends on.
    """

    def __init__(
        self,
        joint: JointGraph,
        state: StageSlots,
        made: ResultParts,
        backend: Backend,
        *,
        recompute: bool,
    ) -> None:
        num_weights, num_own = len(state.parameters), len(state.parameters) + len(state.buffers)
        self._joint = joint
        self._backend = backend
        self._weights = dict(zip(joint.given, state.parameters, strict=False))
        self._buffers = dict(zip(joint.given[num_weights:], state.buffers, strict=False))
        self._given = {node: place for place, node in enumerate(joint.given[num_own:])}
        end = len(joint.outputs) - made.num_borders
        num_results = end - len(state.buffers)
        self._results = joint.outputs[:num_results]
        self._kept = {origin_of(node) for node in joint.outputs[end:]} if recompute else None
        new_values = zip(self._buffers, joint.outputs[num_results:end], made.replaced, strict=True)
        self._written = {
            buffer: (value, is_replaced)
            for buffer, value, is_replaced in new_values
            if is_replaced or origin_of(value) is not buffer
        }
        of_weights = joint.gradients[:num_weights]
        ends = zip(of_weights, state.parameters, strict=True)
        self.trained = [slot for end, slot in ends if end is not None]
        self._of_weights: list[fx.Node | None] = [end for end in of_weights if end is not None]
        self._of_given = joint.gradients[num_own:]
        self.depends = _tangents_behind(joint, [*self._of_given, *self._of_weights])
        self._cut: dict[bool, StagePasses] = {}

    def passes(self, *, split: bool) -> StagePasses:
        """The passes, with the backward whole or in two halves."""
        if split not in self._cut:
            with ONE_AT_A_TIME:
                self._cut[split] = self._compiled(split)
        return self._cut[split]

    def _compiled(self, split: bool) -> StagePasses:
        ends: list[list[fx.Node | None]] = [self._of_given, self._of_weights]
        if not split:
            ends = [[*self._of_given, *self._of_weights]]
        written = [value for value, _ in self._written.values()]
        first, *others = parts_of(
            self._joint.module, [[*self._results, *written], *ends], self._order, self._kept
        )
        later = {node for part in others for node in part.takes}
        keeps = [node for node in self._given if node in later]
        keeps_buffers = [node for node in self._buffers if node in later]
        forward = ForwardPass(
            self._function(first),
            tuple(self._given[node] for node in first.takes if node in self._given),
            tuple(self._slot(node) for node in first.takes if node not in self._given),
            len(self._results),
            tuple((self._buffers[node], is_new) for node, (_, is_new) in self._written.items()),
            tuple(self._given[node] for node in keeps),
            tuple((self._buffers[node], node in self._written) for node in keeps_buffers),
        )
        there = [*keeps, *keeps_buffers, *first.hands_on, *self._joint.tangents.values()]
        return StagePasses(forward, *self._backwards(others, there), *(() if split else (None,)))

    def _function(self, part: GraphPart) -> Run:
        num_weights = sum(node in self._weights for node in part.takes)
        return compiled(part.module, self._backend, num_weights)

    def _order(self, node: fx.Node) -> int:
        """Weights last, behind buffers: passes read them where they are held."""
        return 2 if node in self._weights else int(node in self._buffers)

    def _slot(self, node: fx.Node) -> TensorSlot:
        return self._weights.get(node) or self._buffers[node]

    def _backwards(self, parts: Sequence[GraphPart], there: list[fx.Node]) -> list[BackwardPass]:
        passes = []
        for number, part in enumerate(parts):
            later = {node for other in parts[number + 1 :] for node in other.takes}
            leaves = [place for place, node in enumerate(there) if node in later]
            places = {node: place for place, node in enumerate(there)}
            passes.append(
                BackwardPass(
                    self._function(part),
                    tuple(places[node] for node in part.takes if node not in self._weights),
                    tuple(self._weights[node] for node in part.takes if node in self._weights),
                    len(part.ends),
                    tuple(leaves),
                )
            )
            there = [*(there[place] for place in leaves), *part.hands_on]
        return passes


def _tangents_behind(
    joint: JointGraph, gradients: Sequence[fx.Node | None]
) -> list[frozenset[int]]:
    """For each gradient, which of the gradients that come back it depends on."""
    nothing: frozenset[int] = frozenset()
    behind: dict[fx.Node, frozenset[int]] = {}
    for place, node in enumerate(joint.tangents.values()):
        behind[node] = frozenset([place])
    for node in joint.module.graph.nodes:
        if node not in behind:
            behind[node] = nothing.union(*(behind[other] for other in node.all_input_nodes))
    return [nothing if end is None else behind[end] for end in gradients]
