"""The weights of a stage in as many versions as a policy needs, out of place.

A version is a set of leaves: parameters of their own that share memory with the model's as long as
these have not moved on. A forward runs with the leaves of its version put in the place of the
model's parameters; autograd saves the leaves, so nothing that it needs is ever overwritten. An
update gives the model's parameters new memory if the old is still read by somebody, and works in
place if not. Nothing is ever copied back.

Policies that do not stash let go of the weights after the forward. What autograd would have saved
of them (parameters, and views of their memory) is looked up again when the backward asks for it, in
the weights of that time; all else that it saved is from the forward: inputs, masks, statistics, and
what a layer has computed from its weights.

The life of a version that is stashed; the numbers stand at the lines below:

1. The book says which version an op reads.
2. The first op that reads a version which may outlive an update makes its leaves: they share the
   memory of the model's parameters.
3. The leaves stand in the model's place while the op runs; autograd saves them.
4. What a backward adds to their gradients is moved to the model's parameters.
5. Before an update, the newest version gets leaves too if an op will still read it.
6. Right before the optimizer's step, each parameter with a gradient whose memory a version still
   has moves out: it gets a copy, the version keeps the old memory. Others are updated in place.
7. With its last reader a version is dropped, and its memory with it.

Without stashing:

a. A forward reads the newest weights, or leaves with those that are foreseen.
b. Of weights, autograd saves only which part of which parameter it was (``Later``).
c. After the forward the leaves let go of their values.
d. When the backward asks, it is given that part of the weights of that time, corrected as the
   policy says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.op import FORWARDS, RELEASING
from penstock.core.schedule.rounds import Rounds
from penstock.core.versions import PipeMare, Place, Policy, Predict, VersionBook
from penstock.engine.device.activation_meter import Saved, plain
from penstock.engine.model.replay import autocast_here
from penstock.engine.weights.corrections import (
    Drift,
    Leaves,
    LoweredRates,
    Sockets,
    check_predictable,
    predicted,
)


class StandsIn(Protocol):
    """Saved by autograd in the place of a tensor."""

    def unpack(self) -> Tensor:
        """The tensor that a backward gets."""


Instead = Callable[[Tensor], StandsIn | None]
"""A function that gives what to save instead of a tensor, if anything."""


class HeldVersions(NamedTuple):
    """The versions that a stage keeps of its weights.

    Attributes:
        versions: how many there are of the parameter with most of them.
        version_bytes: memory of all versions, the newest included; what is shared counts once.
        extra_bytes: memory of buffers that corrections need.
    """

    versions: int
    version_bytes: int
    extra_bytes: int


class Later:
    """Stands for a weight that a backward will read as it is then."""

    __slots__ = ("_index", "_offset", "_size", "_store", "_stride")

    def __init__(self, store: WeightStore, index: int, tensor: Tensor, offset: int) -> None:
        self._store = store
        self._index = index
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = offset

    def unpack(self) -> Tensor:
        """The same part of the same parameter, now."""
        # [d]
        now = self._store.now(self._index)
        return now.as_strided(self._size, self._stride, now.storage_offset() + self._offset)


class WeightStore:
    """The versions of one stage's weights on one rank.

    Args:
        modules: the stage's, each once.
        policy: which versions passes read; not ``Flush``, under which there is only one.
        place: where the stage stands in the pipeline.
        replicas: how many copies each stage has.
        optimizer: updates the weights; ``None`` if there is nothing to train.

    Raises:
        ModelError: a parameter is of a class of its own, or has hooks, which the leaves would not
            have.
        InputError: the policy cannot foresee what this optimizer will do.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        policy: Policy,
        place: Place,
        replicas: Sequence[int],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._policy = policy
        self._place = place
        self._replicas = tuple(replicas)
        self._optimizer = optimizer
        self._sockets = Sockets(modules)
        self._drift = Drift.of(policy, place)
        if isinstance(policy, Predict) and optimizer is not None:
            check_predictable(optimizer)
        self._lowered: LoweredRates | None = None
        if isinstance(policy, PipeMare) and policy.t1 is not None and optimizer is not None:
            self._lowered = LoweredRates(policy, place, optimizer, lambda: self.synchronous)
        if policy.stashes and optimizer is not None:
            # [6] Right before the step, when it is clear which parameters will change.
            optimizer.register_step_pre_hook(self._make_room)
        self.synchronous = False
        self.begin()

    def begin(self) -> None:
        """A new stream: versions count from 0 again."""
        self._sockets.find()
        if self._drift is not None:
            self._drift.begin(self._live)
        self._ends: list[int] = []
        ends = None if self._policy.updates == "microbatch" else self._ends
        rounds = Rounds(self._replicas, ends)
        self._book = VersionBook(self._policy, rounds, self._place.stage, self._place.num_stages)
        self._versions: dict[int, Leaves] = {}
        self._own: dict[int, Leaves] = {}
        self._now: dict[int, Tensor] = {}
        self._most = self.held()

    def extend(self, end: int) -> None:
        """The next minibatch: microbatches up to ``end`` belong to it."""
        if self._policy.updates == "minibatch":
            self._ends.append(end)

    def updates_until(self, index: int, end: int) -> int:
        """How many updates the stream has made behind one of its minibatches.

        Args:
            index: the minibatch's number in the stream.
            end: how many microbatches there are up to its end.
        """
        if self._policy.updates == "minibatch":
            return index + 1
        return -(-end // self._replicas[self._place.stage])

    @property
    def num_updates(self) -> int:
        """How many updates the stream has made."""
        return self._book.newest

    @property
    def _live(self) -> Leaves:
        return self._sockets.live

    @property
    def num_lowered(self) -> int:
        """How many updates had a lowered rate (PipeMare's T1); 0 under other policies."""
        return 0 if self._lowered is None else self._lowered.num_updates

    @num_lowered.setter
    def num_lowered(self, count: int) -> None:
        if self._lowered is not None:
            self._lowered.num_updates = count

    def drift_of(self, parameter: nn.Parameter) -> Tensor | None:
        """How a parameter moves per update (PipeMare's T2), the store's own tensor; ``None`` where
        nothing follows it."""
        return None if self._drift is None else self._drift.of_parameter.get(parameter)

    @property
    def stashes(self) -> bool:
        """Whether backwards read what their forwards read."""
        return self._policy.stashes

    @contextmanager
    def reading(self, op: Op) -> Iterator[int]:
        """Put the weights that an F, B, I, W or R reads in their place; yields their version."""
        version = self._book.read(op)  # [1]
        if self._policy.stashes:
            used = gathered = self._stashed(version)  # [2]
        else:
            used, gathered = self._of_now(op)  # [a]
        # [4]
        gathering = nullcontext() if op.kind in FORWARDS else self._sockets.gathering(gathered)
        with self._sockets.holding(used), gathering:  # [3]
            yield version
        if op.kind in FORWARDS and not self._policy.stashes:
            self._let_go(used)  # [c]
        if op.kind in RELEASING:
            self._own.pop(op.microbatch, None)
            self._drop_unread()  # [7]
        self._now = {}

    def _stashed(self, version: int) -> Leaves | None:
        if version not in self._versions:
            if self._book.newest == version and not self._outlives_an_update:
                return None  # every pass that reads it comes before the next update
            self._versions[version] = self._sockets.leaves()
        return self._versions[version]

    @property
    def _outlives_an_update(self) -> bool:
        return self._policy.versions_held(self._place) > 1

    def _of_now(self, op: Op) -> tuple[Leaves | None, Leaves | None]:
        """Of a policy that does not stash: the leaves that a pass computes with, if these are not
        simply the newest weights, and those that its graph ends in."""
        moved = self._foreseen(forward=True) if op.kind is Kind.FORWARD else None
        if op.kind is not Kind.FORWARD and self._moves:
            # Layers that run again in a backward read what the backward reads.
            moved = [self.now(index) for index in range(len(self._live))]
        used = None if moved is None else [nn.Parameter(value.data) for value in moved]
        if op.kind not in FORWARDS:
            return used, self._own.get(op.microbatch)
        if used is None:
            self._own.pop(op.microbatch, None)
        else:
            self._own[op.microbatch] = used
        return used, used

    def _foreseen(self, *, forward: bool) -> list[Tensor] | None:
        if not isinstance(self._policy, Predict) or self._optimizer is None:
            return None
        policy, place = self._policy, self._place
        steps = policy.forward_steps(place) if forward else policy.backward_steps(place)
        if not steps or self.synchronous:
            return None
        foreseen = predicted(self._optimizer, steps)
        return [foreseen.get(live, live.detach()) for live in self._live]

    @property
    def _moves(self) -> bool:
        """Whether backwards read something else than the newest weights."""
        if self.synchronous:
            return False
        if isinstance(self._policy, Predict):
            return self._policy.backward_steps(self._place) > 0
        return self._drift is not None

    def now(self, index: int) -> Tensor:
        """A parameter as backwards of this moment read it."""
        if not self._moves:
            return self._live[index].detach()
        if index not in self._now:
            if self._drift is not None:
                self._now[index] = self._drift.before(self._live[index])
            else:
                foreseen = self._foreseen(forward=False)
                assert foreseen is not None
                self._now = dict(enumerate(foreseen))
        return self._now[index]

    def _let_go(self, leaves: Leaves | None) -> None:
        """The graph holds the leaves until its backward, but needs none of their values."""
        for live, leaf in zip(self._live, leaves or self._live, strict=True):
            if leaf is not live:
                leaf.data = live.data

    def instead(self, microbatch: int, *, counts: bool) -> Instead | None:
        """For the forward of a microbatch: what autograd is to save in the place of weights.

        Args:
            microbatch: its number in the stream.
            counts: whether activations are counted, of which stashed weights are none.
        """
        if self._policy.stashes:
            return self._uncounted() if counts else None
        installed = self._own.get(microbatch, self._live)
        parameters_at: dict[int, list[int]] = {}
        for index, parameter in enumerate(installed):
            address = parameter.untyped_storage().data_ptr()
            parameters_at.setdefault(address, []).append(index)

        def substitute(tensor: Tensor) -> Later | None:
            if tensor.layout is not torch.strided:
                return None
            for index in parameters_at.get(tensor.untyped_storage().data_ptr(), ()):
                offset = int(tensor.storage_offset() - installed[index].storage_offset())
                if 0 <= offset < max(1, installed[index].numel()):
                    # [b]
                    return Later(self, index, tensor, offset)
            return None

        return substitute

    def _uncounted(self) -> Instead:
        sets = [self._live, *self._versions.values()]
        weights = {leaf.untyped_storage().data_ptr() for leaves in sets for leaf in leaves}

        def substitute(tensor: Tensor) -> Saved | None:
            is_weight = (
                tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in weights
            )
            return plain(tensor) if is_weight else None

        return substitute

    @contextmanager
    def updating(self, op: Op) -> Iterator[int]:
        """Around an UPDATE: the next version gets memory of its own if this one is still read.
        Yields how many updates came before."""
        version = self._book.read(op)
        if self._policy.stashes:
            if version not in self._book.live:
                self._versions.pop(version, None)
            elif version not in self._versions:
                self._versions[version] = self._sockets.leaves()  # [5]
        with self._drift.following() if self._drift is not None else nullcontext():
            yield version
        self._most = HeldVersions(*map(max, self._most, self.held()))

    def _make_room(self, *_: Any) -> None:
        """New memory for parameters that a step is about to change, where a version that is still
        needed has theirs: this version or, of what has not changed since, one before it."""
        for index, live in enumerate(self._live):
            if live.grad is None:  # what does not change is shared
                continue
            address = live.untyped_storage().data_ptr()
            kept = (leaves[index] for leaves in self._versions.values())
            if any(leaf.untyped_storage().data_ptr() == address for leaf in kept):
                live.data = live.data.clone()

    def _drop_unread(self) -> None:
        live = self._book.live
        self._versions = {
            version: leaves for version, leaves in self._versions.items() if version in live
        }

    def held(self) -> HeldVersions:
        """The versions that are kept now, by unique memory."""
        sets: list[Leaves] = [self._live, *self._versions.values()]
        most = total = 0
        for column in zip(*sets, strict=True):
            storages = {leaf.untyped_storage().data_ptr(): leaf for leaf in column}
            most = max(most, len(storages))
            total += sum(leaf.untyped_storage().nbytes() for leaf in storages.values())
        return HeldVersions(most, total, 0 if self._drift is None else self._drift.num_bytes)

    @property
    def most(self) -> HeldVersions:
        """The most that was kept at once since the stream began."""
        return self._most


def refuse_autocast(store: WeightStore) -> None:
    """Raise ``InputError`` where autocast and a policy contradict each other.

    Autocast computes copies of the weights, which autograd saves like any other value: backwards
    would go through weights of the forward's time after all.
    """
    if not store.stashes and autocast_here():
        raise InputError(
            "autocast makes copies of the weights, so that backwards would read those of the "
            "forward's time; use a policy that stashes (versions.Stash, VerticalSync, "
            "DoubleBuffer), or a model in bfloat16"
        )
