"""From the name of a reducer in a plan to what makes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate

from msgspec.structs import replace

from penstock.base.units import count_of
from penstock.core.summation.split import MOST_PORTIONS
from penstock.engine.reduce.collective import AllReducer
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import MakeReducer, Reducer, SharedWeights
from penstock.engine.reduce.serving import ServerReducer
from penstock.engine.reduce.sharding import ShardedReducer
from penstock.engine.reduce.stale import StaleReducer
from penstock.engine.transport import Transport
from penstock.engine.transport.groups import make_groups
from penstock.planning.plans.summing import Summing


def stepping_servers(summing: Summing, attempt: str, servers: Collection[int]) -> MakeReducer:
    """What makes the reducers of a rank whose shared weights parameter servers update.

    Args:
        summing: the plan's.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        servers: their ranks.
    """
    if summing.stale and servers:
        return partial(StaleReducer, servers=servers, most_stale=summing.stale, attempt=attempt)
    return partial(_sharded, servers=servers)


def maker_of(
    summing: Summing,
    attempt: str,
    holders: Sequence[Sequence[Sequence[int]]],
    seconds: float,
    coordinate: int = 0,
    servers: Collection[int] = (),
) -> MakeReducer:
    """What makes the reducers of a rank that is a process; all ranks call it.

    Args:
        summing: the plan's.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        holders: the processes that hold each group of shared weights, by its tag and by the
            coordinate of tensor ranks, of which each has a part; alike on all ranks.
        seconds: how long ranks wait for each other.
        coordinate: this process's.
        servers: the ranks that are parameter servers, if any are.
    """
    if summing.reducer == "parameter-server":
        return stepping_servers(summing, attempt, servers)
    teams = [team for those in holders for team in those]
    # By tag, the place of this process's team; of groups that it has nothing of, any.
    firsts = accumulate(map(len, holders[:-1]), initial=0) if holders else ()
    places = [
        first + min(coordinate, len(those) - 1)
        for first, those in zip(firsts, holders, strict=True)
    ]
    if summing.reducer == "servers":
        # Each sum counts on its share of a server.
        shares = tuple(
            replace(server, bytes_per_second=server.bytes_per_second / len(teams))
            for server in summing.servers
            if teams
        )
        by_shares = replace(summing, servers=shares)
        return partial(ServerReducer, summing=by_shares, attempt=attempt, numbers=places)
    if summing.reducer == "all-reduce":
        groups = make_groups(seconds, teams)
        return partial(AllReducer, group=[groups[place] for place in places])
    return _sharded if summing.reducer == "sharded" else _by_owners


def _by_owners(rank: int, shared: SharedWeights, transport: Transport) -> Reducer:
    return OwnerReducer(rank, shared, transport, MOST_PORTIONS)


def _sharded(
    rank: int, shared: SharedWeights, transport: Transport, servers: Collection[int] = ()
) -> Reducer:
    """Tied weights are of several stages, each with an optimizer, and of gradients of which tensor
    ranks have terms nobody knows a row before all are summed: all holders keep all of those."""
    make = ShardedReducer if shared.divisible else OwnerReducer
    # A server that steps takes all gradients of a worker at once.
    return make(rank, shared, transport, 1 if servers else MOST_PORTIONS, servers)


def told(summing: Summing) -> str:
    """Who sums gradients, where it is not the usual; else empty."""
    if summing.reducer == "servers":
        servers = count_of(len(summing.servers), "server")
        return f"gradients of copies are summed by ranks and {servers}"
    if summing.reducer == "all-reduce":
        return "gradients of copies are summed by torch.distributed"
    if summing.reducer == "parameter-server":
        servers = count_of(max(len(summing.servers), 1), "parameter server")
        late = f", {summing.stale} late at most" if summing.stale else ""
        return f"weights of copies are updated by {servers}, the last of the ranks{late}"
    if summing.reducer == "sharded":
        return "each copy updates a part of the weights for all"
    return ""
