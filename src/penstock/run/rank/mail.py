"""What passes between the stages of a rank, and to and from other ranks, during one minibatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.run.rank.program import Program, SkipRoute
from penstock.schedule import Kind, Op
from penstock.transport import Edge, Transport

Gradients = list[Tensor | None]


class Mail:
    """Keeps values and gradients until the op that needs them comes, here or on another rank.

    Args:
        program: of this rank.
        transport: to the other ranks.
        number: tells the messages of this attempt at a minibatch from all others.
    """

    def __init__(self, program: Program, transport: Transport, number: int) -> None:
        self._program = program
        self._transport = transport
        self._number = number
        self._base = 0
        self._values: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._skips: dict[tuple[int, int, bool], Any] = {}

    def turn_to(self, program: Program, base: int) -> None:
        """Go on with the next segment, whose units count from ``base``."""
        self._program = program
        self._base = base

    def _unit(self, op: Op) -> int:
        return self._base + self._program.unit(op)

    def value_for(self, op: Op) -> Any:
        """The input of a forward, from the stage before."""
        return self._values.pop((op.stage, self._unit(op)))

    def pass_value(self, op: Op, value: Any) -> None:
        """The output of a forward, for the stage after."""
        self._values[op.stage + 1, self._unit(op)] = value

    def gradients_for(self, op: Op) -> Gradients:
        """Of a stage's output, from the stage after."""
        return self._gradients.pop((op.stage, self._unit(op)))

    def pass_gradients(self, op: Op, gradients: Gradients) -> None:
        """Of a stage's input, for the stage before."""
        if op.stage > 0:
            self._gradients[op.stage - 1, self._unit(op)] = gradients

    def send(self, op: Op) -> None:
        """Perform a send."""
        forward, unit = op.kind is Kind.SEND_FORWARD, self._unit(op)
        value = (
            self._values.pop((op.stage + 1, unit))
            if forward
            else self._gradients.pop((op.stage - 1, unit))
        )
        self._transport.send(self._program.edges[op], self._number + unit, value)

    def receive(self, op: Op) -> None:
        """Perform a receive."""
        program, unit = self._program, self._unit(op)
        value = self._transport.recv(program.edges[op], self._number + unit, program.waiting[op])
        kept: dict[tuple[int, int], Any] = (
            self._values if op.kind is Kind.RECV_FORWARD else self._gradients
        )
        kept[op.stage, unit] = value

    def skips_for(self, op: Op) -> dict[str, Any]:
        """What a forward recalls from earlier stages."""
        routes = self._program.recalls[op.stage]
        return {route.key: self._take(route, op, backward=False) for route in routes}

    def pass_skips(self, op: Op, skips: Mapping[str, Any]) -> None:
        """What a forward stashed for later stages."""
        for route in self._program.stashes[op.stage]:
            self._hand(route, op, skips[route.key], backward=False)

    def skip_gradients_for(self, op: Op) -> dict[str, Gradients]:
        """Of what the stage stashed; what is recalled last in the model comes first."""
        routes = reversed(self._program.stashes[op.stage])
        return {route.key: self._take(route, op, backward=True) for route in routes}

    def pass_skip_gradients(self, op: Op, gradients: Mapping[str, Gradients]) -> None:
        """Of what the stage recalled."""
        for route in self._program.recalls[op.stage]:
            self._hand(route, op, gradients[route.key], backward=True)

    def _hand(self, route: SkipRoute, op: Op, value: Any, *, backward: bool) -> None:
        # The chain carries the same microbatch there later, so nobody waits for it.
        edge, unit = self._edge(route, op, backward), self._unit(op)
        if edge is not None:
            self._transport.send(edge, self._number + unit, value)
        else:
            self._skips[route.number, unit, backward] = value

    def _take(self, route: SkipRoute, op: Op, *, backward: bool) -> Any:
        edge, unit = self._edge(route, op, backward), self._unit(op)
        if edge is None:
            return self._skips.pop((route.number, unit, backward))
        what = "the gradient of skip" if backward else "skip"
        waiting = self._program.awaiting(op, f"{what} {route.key!r} of rank {edge.source}")
        return self._transport.recv(edge, self._number + unit, waiting)

    def _edge(self, route: SkipRoute, op: Op, backward: bool) -> Edge | None:
        return self._program.skip_edge(route, op.microbatch, backward=backward)
