"""Which stages of a rank are in memory: they come from a tier before they are needed, and leave.

The life of a stage that comes and goes; the numbers stand at the lines below:

1. When the pipeline is built, its weights go to the tier and are blank from then on.
2. A fetch takes a buffer and lets the reader fill it. If the tier is still to get what was written
   there last, the reader waits for that.
3. The first op that needs the weights waits until they have come, and points the parameters there.
4. What autograd would save of weights in a forward is noted as a place, and looked up where they
   lie when the backward asks. Without that, a backward reads a buffer in which something else is.
5. Optimizer state is found behind the first update, and travels from then on.
6. A stage that has changed is written; its buffer is used again once that is done, which the next
   leave waits for. One that has not changes nothing on the tier.
7. Gradients without an update leave, too, and come back before more is added to them.
8. A buffer that any other tensor still sees would give it another stage's values: that is an error.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf

import torch
from torch import Tensor, nn

from penstock.core.schedule.residence import StageResidency, whole_pages
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.crossing import moved
from penstock.engine.device.memory import KeptPages
from penstock.engine.weights.buffers import (
    BufferPool,
    MemoryBuffer,
    SwapGroup,
    WeightPlaceholder,
    state_tensors,
)
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.gradient_slots import GradientSlots, SpareGradient
from penstock.engine.weights.store import Instead
from penstock.engine.weights.transfers import Shelved, Transfers, shelved


class Residency:
    """The stages of one rank that come and go.

    Args:
        path: to the rank's tier and back.
        buffers: memory for what is here, on the rank's device.
        weights: by stage, the parameters that leave with it, each of one stage only.

    Attributes:
        store: the rank's tier.
        buffers: as given.
        transfers: what is on its way between them.
        room_bytes: what freed memory may take that is kept for later, with all that is in use
            beside buffers. That begins behind the first update of all stages, which makes their
            state.
    """

    def __init__(
        self, path: DataPath, buffers: BufferPool, weights: Mapping[int, Sequence[nn.Parameter]]
    ) -> None:
        self.store, self.buffers = path.space, buffers
        self.transfers = Transfers(path, buffers)
        self.room_bytes = inf
        self._kept: KeptPages | None = None
        self._to_begin = set(weights)
        self._optimizers: Mapping[int, torch.optim.Optimizer] = {}
        self._owed: Container[int] = ()
        self._parameters = weights
        self._weights: dict[int, list[SwapGroup]] = {}
        self._state: dict[int, SwapGroup] = {}
        self._gradients: dict[int, tuple[SwapGroup, list[nn.Parameter]]] = {}
        self._spent: dict[int, SwapGroup] = {}
        """Gradients that are used up, whose extents the next ones get."""
        self._adding: dict[int, int] = {}
        """Bytes of gradients that are being added up where autograd makes them, by stage."""
        self._slots: dict[int, GradientSlots] = {}
        self._spare_gradient = SpareGradient()
        self._stays: dict[int, StageResidency] = {}
        self._changed: set[int] = set()

    def take_in(self, stage: int) -> None:
        """Move a stage's weights to the tier: it is built. [1]

        They may be in main memory wherever the rank computes, so that its device never has to hold
        what does not fit there.

        Raises:
            FileError: the tier has no room.
        """
        parameters = self._parameters[stage]
        groups = [
            SwapGroup(f"{kind} of stage {stage}", chosen, stage)
            for kind, trained in (("weights", True), ("frozen weights", False))
            if (
                chosen := [
                    parameter for parameter in parameters if parameter.requires_grad is trained
                ]
            )
        ]
        self._weights[stage] = groups
        for group in groups:
            group.extent = self.store.reserve(group.whose, group.num_bytes)
            packed = MemoryBuffer(max(group.num_bytes, whole_pages(1)))
            gradients = [parameter.grad for parameter in group.tensors]
            for parameter in group.tensors:
                parameter.grad = None  # which would have to be where the values are
            group.move_in(packed)
            self.transfers.path.put(group.extent, packed)
            group.blank(self.buffers.device)
            group.buffer = None
            for parameter, gradient in zip(group.tensors, gradients, strict=True):
                parameter.grad = None if gradient is None else moved(gradient, self.buffers.device)

    def follow(self, optimizers: Mapping[int, torch.optim.Optimizer], owed: Container[int]) -> None:
        """Let what optimizers keep travel as well.

        Args:
            optimizers: by stage.
            owed: the stages whose update is late, for which their gradients are on the tier; the
                caller's own, which is asked again and again.
        """
        self._optimizers, self._owed = optimizers, owed
        self._slots = {stage: slots for stage, slots in self._slots.items() if slots.fit}
        for stage in self._weights:
            self._find_state(stage)  # some keep something from the beginning
            if self._state[stage].buffer is not None:
                self.transfers.let_go(self._state[stage], writes=True, keeps=False)
                self.transfers.finish()

    def reserve_state(self, stage: int, num_bytes: int) -> None:
        """Make room on the tier for optimizer state that is still to be made.

        Raises:
            FileError: the tier has no room.
        """
        group = self._state[stage] = SwapGroup(f"optimizer state of stage {stage}", [], stage)
        group.extent = self.store.reserve(group.whose, num_bytes)

    def reserve_gradients(self, stage: int) -> None:
        """Make room on the tier for gradients that leave without an update.

        Raises:
            FileError: the tier has no room.
        """
        group = self._spent[stage] = SwapGroup(f"gradients of stage {stage}", [], stage)
        group.num_bytes = self.gradient_bytes(stage)
        group.extent = self.store.reserve(group.whose, group.num_bytes)

    def slots(self, stage: int, modules: Iterable[nn.Module]) -> GradientSlots | None:
        """Where a stage's gradients are added up from now on, if the rank computes in main memory
        and most of them can be written there.

        Args:
            modules: all that the stage consists of.
        """
        trained = [group for group in self._weights[stage] if group.is_trained]
        if not trained or not is_on_host(self.buffers.device):
            return None
        slots = GradientSlots.of(trained[0], modules, self._spare_gradient)
        if slots is not None:
            self._slots[stage] = slots
        return slots

    @property
    def stages(self) -> Sequence[int]:
        """Those that come and go."""
        return tuple(self._weights)

    def parameters(self, stage: int) -> Sequence[nn.Parameter]:
        """The weights of a stage that come and go."""
        return self._parameters[stage]

    def begin(self) -> None:
        """A minibatch begins, of which nothing is in memory yet."""
        if self._kept is None and not self._to_begin:
            self._kept = KeptPages(self.room_bytes, lambda: self.buffers.mapped_bytes)

    def fetch(self, stage: int, stay: StageResidency) -> None:
        """Begin to bring a stage in; for a late update, with all that this needs. [2]"""
        self._stays[stage] = stay
        for group in self._weights[stage]:
            self.transfers.begin(group, stay.needed_at)
        owes = stay.late and stage in self._owed
        if owes and stage in self._state:
            self.transfers.begin(self._state[stage], stay.needed_at)
        if owes and stage in self._gradients:
            self.transfers.begin(self._gradients[stage][0], stay.needed_at)

    def arrive(self, stage: int) -> bool:
        """Wait until a stage's weights are here. [3]

        Returns:
            Whether they were not known to be here before.

        Raises:
            FileError: they could not be read, or are not what was written.
            DeadlineError: they do not come.
        """
        came = [self._bring(group) for group in self._weights[stage]]
        return any(came)

    def _bring(self, group: SwapGroup) -> bool:
        self.transfers.begin(group)
        return self.transfers.arrive(group)

    def arrive_with_state(self, stage: int) -> bool:
        """Wait until a stage is here with all that its update needs, and nobody writes it any more:
        what stays where it is, the tier may still be getting from there.

        Returns:
            Whether any of it was not known to be here before.
        """
        waited = self.arrive(stage)
        for group in self._weights[stage]:
            self.transfers.written(group)
        state = self._state.get(stage)
        return (state is not None and self._bring(state)) or waited

    def bring_gradients(self, stage: int) -> bool:
        """Give parameters the gradients that have left before, if there are any. [7]

        Returns:
            Whether any came.
        """
        if stage not in self._gradients:
            return False
        group, parameters = self._gradients[stage]
        if group.buffer is not None and group.arriving is None:
            return False
        self._bring(group)
        for parameter, gradient in zip(parameters, group.tensors, strict=True):
            parameter.grad = gradient
        return True

    def begin_adding(self, stage: int) -> bool:
        """Before a backward: bring in what was added up before, or count what will be; and begin
        to bring in what the update behind the backwards needs.

        Returns:
            Whether something came that was waited for.
        """
        stay = self._stays[stage]
        if stay.updates and stage in self._state:
            self.transfers.begin(self._state[stage], stay.updated_at)
        if stage in self._gradients:
            return self.bring_gradients(stage)
        num_bytes, whose = self.gradient_bytes(stage), f"gradients of stage {stage}"
        slots = self._slots.get(stage)
        if slots is not None:
            slots.buffer = slots.buffer or self.buffers.take(num_bytes, whose)
        elif stage not in self._adding:
            self._adding[stage] = num_bytes
            self.buffers.count(num_bytes, whose)
        return False

    def added(self, stage: int) -> None:
        """Behind a backward: let gradients lie together, and mind what is kept of freed memory."""
        if stage in self._slots:
            self._slots[stage].gather()
        if self._kept is not None:
            self._kept.mind()

    def _add_no_more(self, stage: int) -> None:
        self.buffers.count(-self._adding.pop(stage, 0))
        slots = self._slots.get(stage)
        if slots is not None and slots.buffer is not None:
            buffer, slots.buffer = slots.buffer, None
            # Who failed may still see them, or who keeps gradients behind an update.
            (self.buffers.drop if buffer.is_held else self.buffers.give)(buffer)

    @property
    def most_made_bytes(self) -> int:
        """The most that gradients of a stage have that are added up where autograd makes them."""
        made = (self.gradient_bytes(stage) for stage in self.stages if stage not in self._slots)
        return max(made, default=0)

    def gradient_bytes(self, stage: int) -> int:
        """Bytes of the gradients of a stage's trained weights."""
        return sum(group.num_bytes for group in self._weights[stage] if group.is_trained)

    def weight_bytes(self, stage: int) -> int:
        """Bytes of all weights of a stage that come and go."""
        return sum(group.num_bytes for group in self._weights[stage])

    def state_bytes(self, stage: int) -> int:
        """Bytes of what the optimizer keeps of a stage, as far as it comes and goes."""
        return self._state[stage].num_bytes if stage in self._state else 0

    def instead(self, stage: int) -> Instead:
        """A function that gives what autograd saves in the place of a stage's weights. [4]"""
        there = [
            (group, group.buffer) for group in self._weights[stage] if group.buffer is not None
        ]

        def substitute(tensor: Tensor) -> WeightPlaceholder | None:
            if tensor.layout is torch.strided:
                address = tensor.untyped_storage().data_ptr()
                for group, buffer in there:
                    if address == buffer.start:
                        return WeightPlaceholder(group, buffer, tensor)
            return None

        return substitute

    def updated(self, stage: int, *, late: bool = False) -> None:
        """The optimizer has stepped: gradients are spent, and its state may be new. [5]

        Args:
            late: whether forwards follow, which do not need the state.
        """
        self._changed.add(stage)
        self._to_begin.discard(stage)
        if stage in self._gradients:
            group = self._spent[stage] = self._gradients.pop(stage)[0]
            if group.buffer is not None:
                buffer, group.buffer = group.buffer, None
                group.blank()
                self.transfers.give(buffer, group)
        self._add_no_more(stage)
        self._find_state(stage)
        if late and stage in self._state:
            self.transfers.let_go(self._state[stage], writes=True, keeps=False)

    def _find_state(self, stage: int) -> None:
        """Let what an optimizer keeps travel, also if it is another object than before."""
        tensors = state_tensors(self._optimizers.get(stage), self._parameters[stage])
        known = self._state.get(stage)
        here = known is not None and known.buffer is not None and known.is_in(known.buffer)
        if not tensors or (known is not None and here and _same(known.tensors, tensors)):
            return
        group = SwapGroup(f"optimizer state of stage {stage}", tensors, stage)
        buffer = None
        if known is not None:
            buffer, known.buffer = known.buffer, None
            if known.extent is not None and known.extent.num_bytes >= group.num_bytes:
                group.extent, group.writing = known.extent, known.writing
        if buffer is not None and buffer.taken_bytes != group.num_bytes:
            self.buffers.drop(buffer)  # some of the tensors may lie there still
            buffer = None
        if group.extent is None or group.extent.num_bytes != group.num_bytes:
            group.extent = self.store.reserve(group.whose, group.num_bytes)
        if buffer is not None:
            # Values may lie there still, where others are to go.
            for tensor in tensors:
                tensor.data = tensor.detach().clone()
        group.move_in(buffer or self.buffers.take(group.num_bytes, group.whose))
        self._state[stage] = group

    def leave(self, stage: int, stay: StageResidency) -> None:
        """Let a stage go, and begin to write what has changed. [6]

        Raises:
            ModelError: something still sees the weights.
            FileError: what left before could not be written.
        """
        self.transfers.finish()
        if self._kept is not None:
            self._kept.mind()
        changed = stage in self._changed
        self._changed.discard(stage)
        for group in self._weights[stage]:
            # Hooks of the user may have written to weights as well.
            writes = (changed and group.is_trained) or group.has_changed
            self.transfers.let_go(group, writes=writes, keeps=stay.keeps)
        if stage in self._state:
            self.transfers.let_go(self._state[stage], writes=changed, keeps=False)
        self._send_gradients(stage)

    def _send_gradients(self, stage: int) -> None:
        pairs = [(own, own.grad) for own in self._parameters[stage] if own.grad is not None]
        if not pairs:
            return
        known = self._gradients.get(stage)
        parameters, gradients = [own for own, _ in pairs], [gradient for _, gradient in pairs]
        if known is not None and known[0].buffer is not None and _same(known[0].tensors, gradients):
            group = known[0]
        else:
            group = SwapGroup(f"gradients of stage {stage}", gradients, stage)
            before = known[0] if known is not None else self._spent.get(stage)
            if before is not None and before.num_bytes == group.num_bytes:
                group.extent, group.writing = before.extent, before.writing
            else:
                group.extent = self.store.reserve(group.whose, group.num_bytes)
            if known is not None and known[0].buffer is not None:
                self.buffers.drop(known[0].buffer)
            if stage not in self._slots or not self._slots[stage].hand_over(group):
                self._add_no_more(stage)  # what is moved in is free at once
                group.move_in(self.buffers.take(group.num_bytes, group.whose))
        self._gradients[stage] = group, parameters
        for parameter in parameters:
            parameter.grad = None
        self.transfers.let_go(group, writes=True, keeps=False)

    @contextmanager
    def visiting(self, stage: int, *, changes: bool = False) -> Iterator[None]:
        """Have a stage in memory, between steps, with all that belongs to it.

        Args:
            changes: whether values become others meanwhile, which are then written.
        """
        here = any(group.buffer is not None for group in self._weights[stage])
        self.arrive_with_state(stage)
        try:
            yield
        finally:
            if changes:
                self._find_state(stage)
                self._changed.add(stage)
            self.leave(stage, StageResidency(stage, keeps=here))
            self.transfers.finish()

    def shelved(self, stage: int, tensors: Mapping[str, Tensor]) -> dict[str, Shelved]:
        """Of some tensors, those that lie on the tier, where they are held as they are until
        somebody says otherwise; while the stage is visited.

        Args:
            tensors: by name: weights and what the optimizer keeps, or parts of other memory.
        """
        return shelved(self.transfers.path, self._groups(stage), tensors)

    def _groups(self, stage: int) -> list[SwapGroup]:
        """The weights and the optimizer state of a stage."""
        state = self._state.get(stage)
        return self._weights[stage] if state is None else [*self._weights[stage], state]

    def forget(self) -> None:
        """A step has failed, or another kind of step begins: let all go that is here. What has
        changed is written; gradients that no update waits for are dropped."""
        with suppress(Exception):  # what failed has been told
            self.transfers.finish()
        for stage in self._weights:
            self._forget(stage)

    def _forget(self, stage: int) -> None:
        changed = stage in self._changed
        self._changed.discard(stage)
        for group in self._groups(stage):
            buffer = group.buffer
            if buffer is None:
                continue
            with suppress(Exception):
                self.transfers.arrive(group)
                if (changed and group.is_trained) or (group.has_parameters and group.has_changed):
                    assert group.extent is not None
                    self.transfers.write(group, buffer)
                    self.transfers.written(group)
            group.arriving = None
            group.is_parked = False
            group.blank()
            group.buffer = None
            self.buffers.drop(buffer)  # what has failed may still see it
        self._add_no_more(stage)
        if stage in self._gradients and stage not in self._owed:
            group, parameters = self._gradients.pop(stage)
            self._spent[stage] = group
            for parameter in parameters:
                parameter.grad = None
            if group.buffer is not None:
                self.buffers.drop(group.buffer)
                group.buffer = None
                group.arriving = None

    def close(self) -> None:
        """End the transfers, and give back the tier and the memory. Weights stay blank."""
        self.forget()
        self.transfers.close()
        self.buffers.clear()
        self._spare_gradient.free()
        self.store.close()


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
