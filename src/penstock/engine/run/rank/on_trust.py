"""Post-validation: updates that wait for nobody between gradients and steps (arXiv 2401.10241,
section 4). All that it takes is here; the numbers stand at the lines, and in ``worker``:

1. A stage whose gradients are complete notes the norms of its parameters' gradients.
2. With its last stage, the rank tells all others its norms, before it steps.
3. It remembers weights, gradients and optimizer state, and steps: on trust.
4. The next minibatch begins with the new weights. Its first forwards work on copies of the inputs,
   and buffers are saved, since it may have to begin anew. If the user's code fails, that may be for
   weights that will not stand: a poison value goes on in place of the right one, and the error is
   kept.
5. At the AGREE op, which stands where waiting costs least, the rank reads the others' norms. All
   ranks come to the same verdict from the same numbers.
6. The steps stand: what they remembered is dropped, and a kept error is raised after all.
7. They do not: they are undone, made as the verdict says, and the minibatch begins anew with
   messages of new numbers; those of the old attempt are discarded.

Where no minibatch follows, 5 to 7 happen at the end of this one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.engine.reduce.agreement import Share
from penstock.engine.run.rank.failures import stage_error
from penstock.engine.run.rank.interpreter import NO_CONTEXT, Restart
from penstock.engine.run.rank.protocols import NOTHING_KNOWN, UpdateProtocol, UpdateProtocols
from penstock.engine.run.rank.steps import BoundStep, Forward
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.work import RankWork
from penstock.engine.stage.microbatch_graph import Produced


class UpdatesOnTrust(UpdateProtocol):
    """Each stage steps as soon as its gradients are complete, before ranks can have agreed."""

    def __init__(self, updater: Updater) -> None:
        super().__init__(updater)
        self._share = NOTHING_KNOWN
        self._undo: dict[int, Undo] = {}
        self._told: tuple[int, Share, dict[int, Undo]] | None = None
        """Of the minibatch to be validated: its number, what the rank has told, and its steps."""

    def begin(self, number: int) -> None:
        super().begin(number)
        self._share = NOTHING_KNOWN
        self._undo = {}

    def update(self, stage: int) -> None:
        self._to_update.discard(stage)
        updater = self._updater
        updater.gradients.complete(stage)
        overflow = updater.unscale(updater.gradients.of([stage]))
        holding = updater.holdings[stage]
        # [1]
        self._share = self._share.with_that_of(Share.of(holding.counted, overflow))
        if not self._to_update:
            # [2] All else that this step does is this rank's own affair: let the others go on.
            updater.tell(self._number, self._share)
        optimizer = updater.optimizers.get(stage)
        if optimizer is not None:
            updater.num_updates += 1
            # [3]
            self._undo[stage] = Undo(optimizer, holding.named.values())
            updater.step_as_it_is(stage)
        if not self._to_update:
            self._told = self._number, self._share, self._undo
            self._undo = {}

    @property
    def unvalidated(self) -> bool:
        return self._told is not None or bool(self._undo)

    def settle(self) -> bool:
        if self._told is None:
            return True
        number, share, steps = self._told
        # [5]
        verdict = self._updater.judge(number, share)
        stands = verdict.finite and not verdict.clips
        if not stands:  # [7]
            for stage, undo in steps.items():
                undo.take_back()
                self._updater.step(stage, verdict)
        self._updater.step_schedulers()
        self._told = None
        return stands


class Poison(Enum):
    """Stands for a value that could not be computed with weights on trust; it can travel."""

    POISON = "poison"


POISON = Poison.POISON


@dataclass(frozen=True, slots=True)
class ForwardOnTrust(Forward):
    """F that may come before the verdict on the weights which it reads.

    Attributes:
        updates: knows whether weights are on trust.
    """

    updates: UpdateProtocols

    def perform(self, work: RankWork) -> None:
        unit, stage = work.unit(self.unit), self.op.stage
        on_trust = self.updates.now.unvalidated  # [4]
        value = (
            work.pending.values.pop((stage, unit)) if stage else work.input(unit, copied=on_trust)
        )
        skips = work.pending.skips(self.recalled, unit)
        compute = self._compute_on_trust if on_trust or value is POISON else self.compute
        self.hand_on(work, unit, compute(work, unit, value, skips))

    def _compute_on_trust(
        self, work: RankWork, unit: int, value: Any, skips: dict[str, Any]
    ) -> Produced:
        """Compute with weights that may not be allowed to stand. If these make it fail, others must
        get on to where the verdict is read, so something is handed on in place of the value."""
        poison = Produced(POISON, {channel.route.key: POISON for channel in self.stashed})
        if any(given is POISON for given in (value, *skips.values())):
            return poison
        try:
            return self.compute(work, unit, value, skips)
        except Exception as error:  # [4] whatever the user's code raises
            if work.failed_on_trust is None:
                work.failed_on_trust = stage_error(self.op, error, NO_CONTEXT)
            return poison


@dataclass(frozen=True, slots=True)
class Settle(BoundStep):
    """AGREE after updates that were made on trust, in the next minibatch: whether they stand."""

    updates: UpdateProtocols

    def perform(self, work: RankWork) -> None:
        if not self.updates.now.settle():  # [5]
            raise Restart
        if work.failed_on_trust is not None:  # [6]
            raise work.failed_on_trust


GiveBack = Callable[[], Any]
"""Gives a value back as it was: the same object, with its contents of then."""


class Undo:
    """Takes back an optimizer's next step: weights, gradients and the optimizer become what they
    were, to the bit.

    ``load_state_dict`` would not do: it casts state to the dtype of its parameter, so master
    weights in float32 over parameters in bfloat16 would come back rounded. Here tensors get their
    values back in place, and lists and dictionaries their items.

    Args:
        optimizer: the one that will step. All that it keeps in tensors, lists, dictionaries, tuples
            and plain values is remembered, and likewise of optimizers inside of it. An optimizer
            with a ``state_dict`` of its own may keep more: what that tells is remembered as well.
        parameters: what it may change, values and gradients.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        own = {id(parameter): parameter for parameter in parameters}
        in_groups = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._optimizer = optimizer
        tells = _has_state_of_its_own(optimizer)
        self._own_state = copy.deepcopy(optimizer.state_dict()) if tells else None
        # Gradients are cloned, since some optimizers work in their memory.
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in own.values()]
        memory = _Memory()
        self._give_back = [memory.of(value) for value in ({**own, **in_groups}, optimizer)]

    def take_back(self) -> None:
        """Make everything what it was."""
        if self._own_state is not None:
            self._optimizer.load_state_dict(self._own_state)
        with torch.no_grad():
            for give_back in self._give_back:
                give_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _has_state_of_its_own(optimizer: Optimizer) -> bool:
    """Whether an optimizer says itself what it must be given back."""
    kind = type(optimizer)
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
    )


class _Memory:
    """Remembers nested values, each object once."""

    def __init__(self) -> None:
        self._known: dict[int, GiveBack] = {}

    def of(self, value: Any) -> GiveBack:
        """Remember a value; other kinds of object than those below are given back as they are."""
        if id(value) not in self._known:
            # What holds itself finds itself remembered already.
            self._known[id(value)] = lambda: value
            self._known[id(value)] = self._remembered(value)
        return self._known[id(value)]

    def _remembered(self, value: Any) -> GiveBack:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, Optimizer):
            return self._object(value)
        if isinstance(value, dict):
            return self._dictionary(value)
        if isinstance(value, list | deque):
            return self._sequence(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        return lambda: value

    def _object(self, value: Any) -> GiveBack:
        attributes = self.of(vars(value))

        def give_back() -> Any:
            attributes()
            return value

        return give_back

    def _dictionary(self, value: dict[Any, Any]) -> GiveBack:
        items = [(key, self.of(item)) for key, item in value.items()]

        def give_back() -> dict[Any, Any]:
            then = {key: item() for key, item in items}
            value.clear()
            value.update(then)
            return value

        return give_back

    def _sequence(self, value: list[Any] | deque[Any]) -> GiveBack:
        items = [self.of(item) for item in value]

        def give_back() -> list[Any] | deque[Any]:
            then = [item() for item in items]
            value.clear()
            value.extend(then)
            return value

        return give_back

    def _tuple(self, value: tuple[Any, ...]) -> GiveBack:
        items = [self.of(item) for item in value]

        def give_back() -> tuple[Any, ...]:
            for item in items:
                item()
            return value

        return give_back


def _tensor(value: Tensor) -> GiveBack:
    then = value.detach().clone()

    def give_back() -> Tensor:
        value.copy_(then)
        return value

    return give_back
