"""``Summing``: how ranks of a plan that hold the same weights sum their gradients; and where its
parameter servers are, if it has any.

A server of stages whose ranks are groups of tensor ranks is such a group itself: what a member of a
stage hands in, the member of the server with the same coordinate sums and updates. Stages of
different numbers of tensor ranks have different servers; those of one machine stand together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import Value, number, one_of, whole
from penstock.core.cluster import SpareMachine
from penstock.core.cluster.parts import MOST_LEVELS
from penstock.core.summation.split import MOST_SERVERS
from penstock.core.summation.tree import SumTree
from penstock.core.timing.simulator.beside import Served

if TYPE_CHECKING:
    from penstock.planning.plans.plan import Plan
    from penstock.planning.plans.stage_plan import StagePlan

ReducerName = Literal[
    "owners", "sharded", "fully-sharded", "parameter-server", "servers", "all-reduce"
]

GatheredFor = Literal["step", "use"]

Across = Literal["every", "first"]

N = TypeVar("N", float, Any)
"""A number, or a table of them."""

REDUCERS: tuple[str, ...] = get_args(ReducerName)
"""Names of the ways to sum."""

_WITH_SERVERS = frozenset({"servers", "parameter-server"})

COPIES_OF_GRADIENTS: dict[ReducerName, int] = {
    "owners": 1, "sharded": 1, "fully-sharded": 0, "parameter-server": 1, "servers": 3,
    "all-reduce": 1,
}  # fmt: skip
"""How often a holder keeps its gradients besides ``.grad`` while they are summed: what it has got
and made; with servers, also what it gave, this time and the time before."""

BY_SHARE: frozenset[str] = frozenset({"sharded", "fully-sharded"})
"""Ways to sum by which each copy of a stage updates its share of the weights."""


def room_to_sum(reducer: ReducerName, gradient_bytes: N, largest_bytes: N) -> N:
    """Bytes that a copy of a stage keeps besides weights and gradients, at most, for their sums.

    Args:
        gradient_bytes: of the stage's gradients.
        largest_bytes: of the layer that has most of them.
    """
    if reducer == "fully-sharded":
        return 2 * largest_bytes  # what is on its way of one layer, and is sent of the next
    return COPIES_OF_GRADIENTS[reducer] * gradient_bytes


GATHERED_LAYERS = 2
"""Layers whose bytes a copy has besides its rows where weights are gathered for each use: the one
that computes, and the next one, whose rows come meanwhile."""


def weights_held(
    gathered_for: GatheredFor, parameter_bytes: N, largest_bytes: N, num_shards: int
) -> N:
    """Bytes of weights that a copy of a fully sharded stage keeps at most.

    Args:
        parameter_bytes: of all weights.
        largest_bytes: of the layer that has most of them.
        num_shards: of the weights.
    """
    rows = parameter_bytes / num_shards
    return rows + (parameter_bytes if gathered_for == "step" else GATHERED_LAYERS * largest_bytes)


def in_shards(stage: StagePlan, before: int, after: int) -> StagePlan:
    """A fully sharded stage of which a copy has one of ``after`` shards, and not of ``before``;
    where nobody has counted the bytes of shards, as it is."""
    if stage.weight_bytes is None or before == after:
        return stage
    rows = stage.parameter_bytes / after - stage.parameter_bytes / before
    return replace(
        stage,
        weight_bytes=ceil(stage.weight_bytes + rows),
        optimizer_bytes=ceil(stage.optimizer_bytes * before / after),
    )


def exchanged_bytes(reducer: ReducerName, gradient_bytes: N, parameter_bytes: N) -> N:
    """Bytes of which copies exchange a half to sum gradients, and a half to have what comes of it:
    sums, or weights.

    Args:
        gradient_bytes: of the stage's gradients.
        parameter_bytes: of its weights.
    """
    if reducer in BY_SHARE or reducer == "parameter-server":
        return (gradient_bytes + parameter_bytes) / 2
    return gradient_bytes


MOST_STALE = 1000
"""By how many updates a gradient may be late at most: more is a mistake."""


class Summing(Value, frozen=True, kw_only=True):
    """How gradients of weights with several holders become one sum. Threads of one process sum
    where they are, in the order of ``levels``, whatever else this says.

    Attributes:
        reducer: ``"owners"``: each holder sums an equal slice for all, in the order of the ranks;
            the default. ``"sharded"``: the same, and it updates the slice, too, and hands back
            weights, so that it keeps its share of the optimizer state only (ZeRO-1).
            ``"fully-sharded"``: each copy keeps rows of weights, sums and optimizer state only, and
            gathers the weights of a layer to compute with it (ZeRO-2 and 3, torch's FSDP2).
            ``"parameter-server"``: ranks behind those of the stages do nothing else than to sum,
            update and hand back weights; they alone have optimizer state. ``"servers"``: holders
            and spare machines sum, as much each as makes all links done at once (BytePS).
            ``"all-reduce"``: ``torch.distributed`` sums, in whatever order.
        servers: for ``"servers"``, the machines on which ``penstock serve`` runs; for
            ``"parameter-server"``, those on which the last ranks run, one each; without any, there
            is one such rank.
        stale: by how many updates the gradients of a copy may be late, so that the others need not
            wait for it; only with one parameter server. With 0, each update waits for all.
        bytes_per_second: of the link of each rank in each direction, in the order of the ranks; all
            links count as equal where nobody says.
        levels: which ranks are near each other, innermost groups first: of each level the number of
            every rank's group, as ``((0, 0, 1, 1),)`` for two hosts. Inside such a group sums are
            made first (``penstock.core.summation.tree``), and all additions are in the order of
            this tree; threads and proofs keep to it, too. Without any, in the order of the ranks.
            A parameter server is near nobody; stale updates have no levels. Fully sharded, each
            outermost group has all weights, and its ranks shards of them (hybrid sharding).
        gathered_for: with ``"fully-sharded"``, how long weights stay gathered: for a whole
            ``"step"`` (ZeRO-2), or for each ``"use"`` of a layer, forward or backward, after which
            they are freed (ZeRO-3).
        across: who exchanges sums between the outermost groups: ``"every"`` rank its own share, or
            the ``"first"`` of each for all.

    Raises:
        InputError: no such reducer; servers for one that has none, or two of one address; levels
            whose groups are not made of those of the level before.
    """

    reducer: ReducerName = "owners"
    servers: tuple[SpareMachine, ...] = ()
    stale: int = 0
    bytes_per_second: tuple[float, ...] = ()
    levels: tuple[tuple[int, ...], ...] = ()
    across: Across = "every"
    gathered_for: GatheredFor = "step"

    def __post_init__(self) -> None:
        one_of("reducer", self.reducer, REDUCERS)
        self.check_fields("summing")
        if self.servers and self.reducer not in _WITH_SERVERS:
            raise InputError(
                f"the reducer {self.reducer!r} uses no servers; leave them out, or take "
                "'servers' or 'parameter-server'"
            )
        if len(self.servers) > MOST_SERVERS:
            raise InputError(f"{len(self.servers)} servers are too many; take {MOST_SERVERS}")
        twice = Counter(server.where for server in self.servers).most_common(1)
        if twice and twice[0][1] > 1:
            raise InputError(f"{twice[0][0]!r} is the address of two servers; name each once")
        whole("stale", self.stale, 0, MOST_STALE)
        if self.stale and (self.reducer != "parameter-server" or len(self.servers) > 1):
            raise InputError(
                "stale updates are made by one parameter server, which decides what each of them "
                "gets; take the reducer 'parameter-server' with one server at most, or stale=0"
            )
        if self.stale and self.levels:
            raise InputError(
                "stale updates are made of each copy's own gradients, not of sums inside hosts; "
                "leave levels out, or take stale=0"
            )
        for rate in self.bytes_per_second:
            number("summing: bytes_per_second", rate, positive=True)
        one_of("across", self.across, get_args(Across))
        one_of("gathered_for", self.gathered_for, get_args(GatheredFor))
        if self.gathered_for != "step" and self.reducer != "fully-sharded":
            raise InputError(
                f"gathered_for={self.gathered_for!r} is for the reducer 'fully-sharded', and the "
                f"reducer is {self.reducer!r}, whose copies keep all weights; leave it out"
            )
        self._check_levels()

    def _check_levels(self) -> None:
        whole("summing: the number of levels", len(self.levels), 0, MOST_LEVELS)
        before: Sequence[int] = range(len(self.levels[0])) if self.levels else ()
        for numbers in self.levels:
            if min(numbers, default=0) < 0:
                raise InputError(
                    f"summing: levels have the number {min(numbers)}; groups are numbered from 0"
                )
            outer: dict[int, int] = {}
            if len(numbers) != len(before):
                raise InputError(
                    f"summing: levels have {len(before)} and {len(numbers)} numbers; each level "
                    "gives the group of every rank"
                )
            for rank, (inner, group) in enumerate(zip(before, numbers, strict=True)):
                if outer.setdefault(inner, group) != group:
                    raise InputError(
                        f"summing: levels: rank {rank} is in group {group}, but another rank of "
                        f"its group {inner} of the level before is in group {outer[inner]}; "
                        "groups are made of whole groups"
                    )
            before = numbers

    def shard_groups(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Which copies of a fully sharded stage have its weights together, each a shard of them:
        all, or with levels those of each outermost group, which replicate what the others have.

        Args:
            ranks: of the copies.

        Raises:
            InputError: groups have different numbers of copies.
        """
        together = SumTree.of(ranks, self.levels[-1:]).levels[0]
        if len({*map(len, together)}) > 1:
            sizes = " and ".join(str(len(group)) for group in together)
            raise InputError(
                f"summing: levels give ranks {', '.join(map(str, ranks))} in groups of {sizes}, of "
                "which each would have all weights in shards, and equal ones with the others; make "
                "groups of one size, or leave levels out (hybrid=True makes them)"
            )
        return together

    def num_shards(self, ranks: Sequence[int]) -> int:
        """In how many shards the weights of a fully sharded stage are; arguments and errors as for
        ``shard_groups``."""
        return len(self.shard_groups(ranks)[0])

    def tree(self, ranks: Sequence[int], owners: Sequence[int] | None = None) -> SumTree:
        """The tree in which some ranks sum the weights that they hold.

        Args:
            ranks: the holders.
            owners: who sums for all, if not all do.
        """
        if owners is None and self.across == "first":
            owners = [group[0] for group in SumTree.of(ranks, self.levels[-1:]).levels[0]]
            owners = owners if len(owners) > 1 else None
        return SumTree.of(ranks, self.levels, owners)


def served_stages(plan: Plan) -> tuple[int, ...]:
    """The stages that parameter servers update: those with copies, if the plan has such servers."""
    if plan.summing.reducer != "parameter-server":
        return ()
    ranks_of = plan.placement.ranks_of
    return tuple(stage for stage in range(len(plan.stages)) if len(ranks_of(stage)) > 1)


def _server_sizes(plan: Plan) -> tuple[int, ...]:
    """How many members each parameter server has, in the order of their ranks."""
    sizes = sorted({plan.stages[stage].tensor_ranks for stage in served_stages(plan)})
    return tuple(sizes) * max(len(plan.summing.servers), 1)


def server_ranks(plan: Plan) -> range:
    """The numbers of the ranks that are parameter servers: those behind the plan's own."""
    return range(plan.num_ranks, plan.num_ranks + len(_server_sizes(plan)))


def servers_of(plan: Plan, stage: int) -> tuple[int, ...]:
    """The ranks that update a stage as parameter servers; none if it has no copies."""
    if stage not in served_stages(plan):
        return ()
    sizes = zip(server_ranks(plan), _server_sizes(plan), strict=True)
    return tuple(rank for rank, size in sizes if size == plan.stages[stage].tensor_ranks)


def all_group_sizes(plan: Plan) -> tuple[int, ...]:
    """How many members each rank has, parameter servers included."""
    return (*plan.group_sizes, *_server_sizes(plan))


def num_processes(plan: Plan) -> int:
    """How many processes perform a plan: one for each member of each rank."""
    return sum(all_group_sizes(plan))


def stages_held(plan: Plan, rank: int) -> Sequence[int]:
    """The stages whose weights a rank has: those that it runs, or those that it updates as a
    parameter server."""
    if rank in server_ranks(plan):
        return tuple(stage for stage in served_stages(plan) if rank in servers_of(plan, stage))
    return plan.placement.stages_of[rank]


def ranks_holding(plan: Plan, stage: int) -> tuple[int, ...]:
    """The ranks that have a stage's weights, parameter servers included."""
    return (*plan.placement.ranks_of(stage), *servers_of(plan, stage))


def served_by(plan: Plan) -> Served:
    """Which stages hand their gradients to how many servers, of whatever kind."""
    summing, updates = plan.summing, plan.summing.reducer == "parameter-server"
    count = max(len(summing.servers), 1) if updates else len(summing.servers)
    if not count:
        return Served()
    ranks_of = plan.placement.ranks_of
    counts = (count * (len(ranks_of(stage)) > 1) for stage in range(len(plan.stages)))
    return Served(tuple(counts), updates)
