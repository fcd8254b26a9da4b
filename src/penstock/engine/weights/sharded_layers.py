"""``ShardedLayers``: one copy of a stage that has rows of its weights, and gathers them to compute.

torch's ``fully_shard`` (FSDP2) gathers and frees: each layer is a unit of its own. Either all are
gathered when a minibatch begins, or hooks ask all copies for their rows whenever a layer runs,
forward and backward. Then all copies run the same layers in the same order
(``planning.plans.lockstep``); where a minibatch has fewer microbatches than the plan, or empty
ones, its layers are gathered once, too. Copies compare what they have gathered before they update:
in a model that takes other ways in other microbatches, they might take each other's layers for
their own.

Gradients stay whole, in the gathered parameters, until the last microbatch comes back, since copies
meet for sums once per update, whatever runs backward: whole, split, or a forward a second time.
Where layers are gathered for each use, a layer is summed as soon as that has made all of its
gradients, while those of the next one are made; else all are behind it. While a layer computes, the
next one's rows come already, forward and backward.

Copies may be shared out over hosts (hybrid): those of a host have a shard each, which the same ones
on the other hosts have as well, so that only sums of shards pass between hosts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.base.errors import ModelError, RunError
from penstock.engine.masters import gradient_dtype, take_gradient_dtype
from penstock.engine.model.spine import NamedLayer
from penstock.engine.weights.local_rows import rows_of, whole_norms

# ``fully_shard`` and its tensors take two seconds to import, and few pipelines need them.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


V = TypeVar("V")
SumInParts: TypeAlias = Generator[None, None, V]
"""A sum that is made in parts: it yields when messages have been asked for, and is gone on with
when something else has been done. All copies go on with theirs in the same order."""


_ENDED = object()


class Copies(Protocol):
    """The copies of a stage, each in a process, as one of them reaches the others. Every copy calls
    the same methods in the same order.

    Attributes:
        group: torch's process group of those that have the weights together, each a shard of them:
            all, or those of a host.
        size: how many these are.
        index: which of them this is.
    """

    group: dist.ProcessGroup
    size: int
    index: int

    def gather(self, output: Tensor, own: Tensor) -> dist.Work:
        """Begin to fill ``output`` with what each of the group has, one after the other; who waits
        for it learns who is missing."""

    def begin_exchange(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to give each copy of the group so many numbers of ``own``, one after the other, and
        to take as many as ``output_sizes`` says from each; what is given back waits for it."""

    def sum_between(self, shard: Tensor) -> SumInParts[Tensor]:
        """The sum of a vector and those of the copies that have the same shard on other hosts."""

    def largest(self, numbers: Tensor) -> None:
        """Make each number the largest that a copy has."""

    def add(self, numbers: Tensor) -> None:
        """Make each number the sum of those of all shards."""

    def take_first(self, values: Tensor) -> None:
        """Overwrite values with those of the first copy."""

    def abandon(self) -> None:
        """Wait for nothing that was asked for before: it belongs to a step that has failed."""

    def close(self, *, failed: bool) -> None:
        """Nothing is asked any more. If this copy has failed, others that wait for it learn so."""


class Gathered:
    """What a copy has gathered since its last update, as a number that copies compare.

    Attributes:
        digest: equal where the same layers were gathered in the same order, and hardly ever else.
    """

    def __init__(self) -> None:
        self.digest = 0

    def add(self, layer: int) -> None:
        """A layer has been gathered; with −1 − its number, it has been summed."""
        self.digest = zlib.crc32(layer.to_bytes(8, "little", signed=True), self.digest)


class _Gather:
    """All-gather as ``fully_shard`` asks for it, with errors that say who is missing.

    Attributes:
        is_pending: whether what was asked for last has come to nothing yet.
    """

    def __init__(self, copies: Copies, number: int, seen: Gathered) -> None:
        self._copies = copies
        self._number = number
        self._seen = seen
        self.is_pending = False

    def note_sum(self) -> None:
        """The layer is summed at this point of the order in which copies meet."""
        self._seen.add(-1 - self._number)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> dist.Work:
        # It is waited for where the layer computes, whoever asked, and however.
        self._seen.add(self._number)
        self.is_pending = True
        return self._copies.gather(output_tensor, input_tensor)


class ShardedParameter(NamedTuple):
    """A parameter of which this copy has rows.

    Attributes:
        whole: what the module has between uses; its shape is that of all rows.
        start: the first row that is here.
        rows: those that are here, in the memory of ``whole``.
    """

    whole: nn.Parameter
    start: int
    rows: nn.Parameter


class _Unit:
    """One layer, which is gathered and freed as a whole."""

    def __init__(
        self, layer: NamedLayer, copies: Copies, mesh: DeviceMesh, number: int, seen: Gathered
    ) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self._copies = copies
        self.layer = layer
        self.module = layer.module
        for parameter in layer.module.parameters():
            copies.take_first(parameter.detach())
        # Before the hook of ``fully_shard``, behind which the gathered parameters are gone again.
        self._after: _Unit | None = None
        layer.module.register_forward_hook(self._note)
        layer.module.register_forward_pre_hook(self._ask_for_next)  # behind that of ``fully_shard``
        fully_shard(layer.module, mesh=mesh, reshard_after_forward=False)
        assert isinstance(layer.module, FSDPModule)
        self.sharded: FSDPModule = layer.module
        self._gather = _Gather(copies, number, seen)
        self.sharded.set_custom_all_gather(self._gather)  # type: ignore[arg-type]
        # Sums are made behind the last W, of which ``fully_shard`` knows nothing.
        self.sharded.set_requires_gradient_sync(False)
        self.sharded.set_reshard_after_backward(False)
        self.whole: list[nn.Parameter] = []
        self.is_summed = False
        with self.gathered():  # settles where rows lie in memory
            self._note()
        self.parameters = [_sharded(whole) for whole in layer.module.parameters()]

    def _note(self, *_: Any) -> None:
        self._gather.is_pending = False
        self.whole = list(self.module.parameters())

    def prefetch(self, before: _Unit | None, after: _Unit | None) -> None:
        """Say which layers' rows are to come already while this one computes.

        Args:
            before: the one that goes backward next.
            after: the one that goes forward next.
        """
        self.sharded.set_modules_to_backward_prefetch([] if before is None else [before.sharded])
        self._after = after

    def _ask_for_next(self, *_: Any) -> None:
        # ``set_modules_to_forward_prefetch`` would want layers that have run before.
        if self._after is not None:
            self._after.sharded.unshard(async_op=True)

    def free_after_use(self, frees: bool) -> None:
        """Say whether whole parameters go behind each forward and backward."""
        self.sharded.set_reshard_after_forward(frees)
        self.sharded.set_reshard_after_backward(frees)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, the module has whole parameters."""
        self.sharded.unshard()
        yield
        self.free()

    def free(self) -> None:
        """Keep no gathered values."""
        if self._gather.is_pending:
            # Nobody has computed with it; left as it is, it would be taken for the next ones.
            self.sharded.unshard()
            self._gather.is_pending = False
        self.sharded.reshard()

    def reset(self) -> None:
        """Forget what a failed step was at."""
        # torch before 2.13 has no way but to go through what is pending.
        getattr(self.sharded, "reset_iter_state", self.free)()
        self._gather.is_pending = False

    @property
    def trained(self) -> list[nn.Parameter]:
        """The whole parameters that gradients come to."""
        return [parameter for parameter in self.whole if parameter.requires_grad]

    @torch.no_grad()
    def summing(self, there: Sequence[bool]) -> SumInParts[None]:
        """Make the gradient of each row the sum over all copies, in their order. Whole gradients go
        at first.

        Args:
            there: of each trained parameter, whether any copy has a gradient.
        """
        pairs = [
            (whole, own.rows)
            for whole, own in zip(self.whole, self.parameters, strict=True)
            if whole.requires_grad
        ]
        due = [pair for pair, is_there in zip(pairs, there, strict=True) if is_there]
        if not due:
            return
        index = self._copies.index
        lengths = [_most_numbers(whole, self._copies.size) for whole, _ in due]
        total, received, wait = self._exchanged([whole for whole, _ in due], lengths)
        yield
        wait()
        del wait  # which knows what was sent
        if index:
            first = received[0]
            for term in received[1:index]:
                first += term
            total += first
        for term in received[index:]:
            total += term
        del received
        total = yield from self._copies.sum_between(total)
        for (whole, rows), numbers in zip(due, torch.split(total, lengths), strict=True):
            fresh = numbers[: rows.numel()].view_as(rows)
            take_gradient_dtype(rows, whole)
            rows.grad = fresh if rows.grad is None else rows.grad + fresh

    def _exchanged(
        self, due: Sequence[nn.Parameter], lengths: list[int]
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Begin to give all copies their rows of gradients, which go.

        Args:
            lengths: how many numbers a copy has at most of each.

        Returns:
            (this copy's rows of its own gradients, where the sum is to be; the others', in their
            order; what waits until they are here).
        """
        size, index = self._copies.size, self._copies.index
        # Its own rows do not travel, so they are where the sum will be.
        total = torch.empty(sum(lengths), dtype=gradient_dtype(due[0]))
        sent = total.new_empty(size - 1, len(total))
        rooms = [torch.split(room, lengths) for room in (*sent[:index], total, *sent[index:])]
        for whole, *columns in zip(due, *rooms, strict=True):
            _take_gradient(whole, columns)
        received = torch.empty_like(sent)
        sizes = [0 if other == index else len(total) for other in range(size)]
        wait = self._copies.begin_exchange(received.view(-1), sent.view(-1), sizes, sizes)
        return total, received, wait

    def note_sum(self) -> None:
        """Its layer is summed at this point of the order in which copies meet."""
        self._gather.note_sum()


def _take_gradient(whole: nn.Parameter, columns: Sequence[Tensor]) -> None:
    """Move a parameter's gradient, 0 if it has none, to where each copy's rows of it are."""
    numbers = whole.new_empty(0) if whole.grad is None else whole.grad.reshape(-1)
    start = 0
    for column in columns:
        part = numbers[start : start + len(column)]
        column[: len(part)] = part
        column[len(part) :] = 0.0
        start += len(column)
    whole.grad = None


def _most_numbers(whole: Tensor, size: int) -> int:
    """How many numbers of a parameter a copy has at most: whole rows, of which the last copies have
    fewer, or none."""
    num_rows = whole.shape[0]
    return -(-num_rows // size) * (whole.numel() // num_rows) if num_rows else 0


def _sharded(whole: nn.Parameter) -> ShardedParameter:
    here = rows_of(whole)
    assert here is not None
    rows = nn.Parameter(here.values, requires_grad=whole.requires_grad)
    return ShardedParameter(whole, here.start, rows)


class ShardedLayers:
    """The layers of a stage, of whose parameters this copy has rows from now on.

    Args:
        layers: the stage's, in main memory, with values of which the first copy's count.
        copies: of the stage.
        frees_with: the number of a minibatch's microbatches with which all copies do the same, so
            that a layer's gathered parameters may be freed behind each use; of others, and if it is
            ``None``, they stay until the minibatch ends.

    Attributes:
        waits_for_all: whether a minibatch begins when all weights that stay for it are here, for
            whoever must know where they lie, and not while they come.

    Raises:
        ModelError: a layer cannot be sharded.
    """

    waits_for_all = False

    def __init__(
        self, layers: Sequence[NamedLayer], copies: Copies, *, frees_with: int | None
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        _check(layers)
        mesh = DeviceMesh.from_group(copies.group, "cpu")
        self._copies = copies
        self._frees_with = frees_with
        self._frees = self._began = False
        self._seen = Gathered()
        self._sums: list[SumInParts[None]] = []
        self._units = [
            _Unit(layer, copies, mesh, number, self._seen)
            for number, layer in enumerate(layers)
            if any(True for _ in layer.module.parameters())
        ]

    @property
    def parameters(self) -> list[ShardedParameter]:
        """Those of all layers, in their order."""
        return [parameter for unit in self._units for parameter in unit.parameters]

    @property
    def gathered(self) -> list[Tensor]:
        """The whole parameters, while there are some; between uses without their values."""
        return [parameter for unit in self._units for parameter in unit.whole]

    def trained(self) -> list[Tensor]:
        """Those that gradients come to."""
        return [parameter for unit in self._units for parameter in unit.trained]

    def begin(self, num_microbatches: int) -> None:
        """A minibatch begins: gather what it will compute with, or get ready to. All copies call
        it.

        Args:
            num_microbatches: that it has, empty ones left out.
        """
        self._began, frees = True, num_microbatches == self._frees_with
        for unit in self._units:
            for whole, own in zip(unit.whole, unit.parameters, strict=True):
                # The optimizer knows rows only, and whole weights of which none are here.
                take_gradient_dtype(whole, own.rows if own.rows.shape[0] else own.whole)
            if frees != self._frees:
                unit.free_after_use(frees)
            if not frees:
                unit.sharded.unshard(async_op=True)  # it is waited for where the layer computes
        if self.waits_for_all and not frees:
            for unit in self._units:
                unit.sharded.unshard()
        if frees != self._frees:
            around = [None, *self._units, None] if frees else [None] * (len(self._units) + 2)
            for unit, before, after in zip(self._units, around, around[2:], strict=False):
                unit.prefetch(before, after)
        self._frees = frees

    @property
    def meets_in_order(self) -> bool:
        """Whether all copies do the same in this minibatch, so that they may sum a layer while the
        last backward goes on."""
        return self._frees

    def layers_trained(self) -> list[int]:
        """Of each parameter of ``trained``, the number of its layer."""
        return [number for number, unit in enumerate(self._units) for _ in unit.trained]

    def sum_layer(self, number: int) -> None:
        """Sum a layer whose gradients are all there, on all copies, while the backward goes on."""
        unit = self._units[number]
        unit.note_sum()
        unit.is_summed = True
        before = _gone_on(self._sums)  # so that no two layers' gradients are twice in memory
        self._sums = [*before, _begun(unit, [True] * len(unit.trained))]

    def sum(self) -> None:
        """Make the gradients of rows the sums over all copies, and keep no whole ones. All copies
        call it; one that has no gradient adds nothing.

        Raises:
            RunError: copies have not gathered the same.
        """
        has = [
            int(unit.is_summed or parameter.grad is not None)
            for unit in self._units
            for parameter in unit.trained
        ]
        digest, self._seen.digest = self._seen.digest, 0
        flags = torch.tensor([digest, -digest, *has])
        self._copies.largest(flags)
        highest, negative_lowest, *largest = flags.tolist()
        if highest != -negative_lowest:
            raise RunError(
                "copies of a stage have run different layers in this step, or in another order, "
                "and have taken each other's weights for their own; nothing has been learned from "
                "it. Where gradients do not go through all layers in all microbatches, take "
                "gathered_for='step'"
            )
        there = map(bool, largest)
        for unit in self._units:
            due = [next(there) for _ in unit.trained]
            if not unit.is_summed:
                begun = _begun(unit, due)
                # Those of the layers before, while this one's gradients travel.
                self._sums = [*_gone_on(self._sums), begun]
            unit.is_summed = False
            unit.free()
        while self._sums:
            self._sums = _gone_on(self._sums)

    def free(self) -> None:
        """Keep no gathered values."""
        for unit in self._units:
            unit.free()

    def close(self, *, failed: bool) -> None:
        """No minibatch follows; ``failed`` says whether it is because this rank has failed."""
        self._copies.close(failed=failed)

    def drop(self) -> None:
        """Forget gradients, and what a failed step was at."""
        self._seen.digest = 0
        self._copies.abandon()
        self._sums.clear()
        for unit in self._units:
            if self._began:  # before, there is nothing to reset, and torch is not ready to
                unit.reset()
            unit.is_summed = False
            for parameter in unit.trained:
                parameter.grad = None

    def norms(self) -> list[Tensor]:
        """The norms of whole gradients, as ``parameters``; 0 where there is none. All copies call
        it."""
        return whole_norms([own.rows for own in self.parameters], self._copies.add)

    def whole_state(self) -> dict[str, Tensor]:
        """Copies of all parameters in the model's names, made anew. All copies call it."""
        state: dict[str, Tensor] = {}
        for unit in self._units:
            with unit.gathered():
                state |= {
                    unit.layer.key(name): parameter.detach().clone()
                    for name, parameter in unit.module.named_parameters(remove_duplicate=False)
                }
        return state


def _begun(unit: _Unit, there: Sequence[bool]) -> SumInParts[None]:
    """A layer's sum, whose first messages are on their way."""
    summing = unit.summing(there)
    next(summing, None)
    return summing


def _gone_on(sums: Sequence[SumInParts[None]]) -> list[SumInParts[None]]:
    """Those of some sums that wait for messages again when each has been taken on."""
    return [summing for summing in sums if next(summing, _ENDED) is not _ENDED]


def _check(layers: Sequence[NamedLayer]) -> None:
    """Raise ``ModelError`` for what ``fully_shard`` cannot shard, or would untie."""
    homes: dict[int, NamedLayer] = {}
    for layer in layers:
        for module in layer.module.modules():
            if getattr(module, "sparse", False):
                raise _refused(layer, f"has a {type(module).__name__} with sparse gradients")
        types = {parameter.dtype for parameter in layer.module.parameters()}
        if len(types) > 1:
            raise _refused(layer, f"has parameters of {' and '.join(sorted(map(str, types)))}")
        for name, parameter in layer.module.named_parameters():
            if not parameter.dim():
                raise _refused(layer, f"has {name!r}, a single number without rows")
            if not parameter.is_contiguous():
                raise _refused(layer, f"has {name!r}, which is not contiguous")
            if homes.setdefault(id(parameter), layer) is not layer:
                other = homes[id(parameter)].name
                raise _refused(layer, f"is tied to layer {other!r}, each being gathered alone")


def _refused(layer: NamedLayer, why: str) -> ModelError:
    return ModelError(
        f"layer {layer.name!r} {why}, which the reducer 'fully-sharded' cannot shard; change that, "
        "or take the reducer 'sharded'"
    )
