"""``Summing``: how ranks of a plan that hold the same weights sum their gradients."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from penstock.base.errors import InputError
from penstock.base.values import Value, number, one_of, whole
from penstock.core.cluster import SpareMachine
from penstock.core.summation.frames import MOST_SERVERS

ReducerName = Literal["owners", "sharded", "parameter-server", "servers", "all-reduce"]

REDUCERS: tuple[str, ...] = get_args(ReducerName)
"""Names of the ways to sum."""

_WITH_SERVERS = frozenset({"servers", "parameter-server"})

COPIES_OF_GRADIENTS: dict[ReducerName, int] = {
    "owners": 1, "sharded": 1, "parameter-server": 1, "servers": 3, "all-reduce": 1,
}  # fmt: skip
"""How often a holder keeps its gradients besides ``.grad`` while they are summed: what it has got
and made; with servers, also what it gave, this time and the time before."""

MOST_STALE = 1000
"""By how many updates a gradient may be late at most: more is a mistake."""


class Summing(Value, frozen=True, kw_only=True):
    """How gradients of weights with several holders become one sum. Threads of one process sum
    where they are, whatever this says.

    Attributes:
        reducer: ``"owners"``: each holder sums an equal slice for all, in the order of the ranks;
            the default. ``"sharded"``: the same, and it updates the slice, too, and hands back
            weights, so that it keeps its share of the optimizer state only (ZeRO-1).
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

    Raises:
        InputError: no such reducer; servers for one that has none, or two of one address.
    """

    reducer: ReducerName = "owners"
    servers: tuple[SpareMachine, ...] = ()
    stale: int = 0
    bytes_per_second: tuple[float, ...] = ()

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
        for rate in self.bytes_per_second:
            number("summing: bytes_per_second", rate, positive=True)
