"""From the name of a reducer in a plan to what makes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from penstock.plans.summing import Summing
from penstock.reduce.collective import AllReducer
from penstock.reduce.owners import OwnerReducer
from penstock.reduce.reducer import MakeReducer, Reducer, SharedWeights
from penstock.reduce.serving import ServerReducer
from penstock.reduce.sharding import ShardedReducer
from penstock.transport import Transport
from penstock.transport.groups import make_groups
from penstock.units import count_of


def maker_of(
    summing: Summing, attempt: str, holders: Sequence[Sequence[int]], seconds: float
) -> MakeReducer:
    """What makes the reducers of a rank that is a process; all ranks call it.

    Args:
        summing: the plan's.
        attempt: the name of this pipeline, in hexadecimal digits, which no other has.
        holders: the ranks that hold each group of shared weights, by its tag; alike on all ranks.
        seconds: how long ranks wait for each other.
    """
    if summing.reducer == "servers":
        # Each group of weights counts on its share of a server.
        servers = tuple(
            replace(server, bytes_per_second=server.bytes_per_second / len(holders))
            for server in summing.servers
            if holders
        )
        return partial(ServerReducer, summing=replace(summing, servers=servers), attempt=attempt)
    if summing.reducer == "all-reduce":
        return partial(AllReducer, group=make_groups(seconds, holders))
    return _sharded if summing.reducer == "sharded" else OwnerReducer


def _sharded(rank: int, shared: SharedWeights, transport: Transport) -> Reducer:
    """Tied weights are of several stages, each with an optimizer: all holders keep all of them."""
    make = ShardedReducer if shared.of_one_stage else OwnerReducer
    return make(rank, shared, transport)


def told(summing: Summing) -> str:
    """Who sums gradients, where it is not the usual; else empty."""
    if summing.reducer == "servers":
        servers = count_of(len(summing.servers), "server")
        return f"gradients of copies are summed by ranks and {servers}"
    if summing.reducer == "all-reduce":
        return "gradients of copies are summed by torch.distributed"
    if summing.reducer == "sharded":
        return "each copy updates a part of the weights for all"
    return ""
