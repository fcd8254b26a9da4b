"""``begin_equal``: weights with several holders begin with the same values."""

from __future__ import annotations

import torch

from penstock.core.summation.split import MOST_PORTIONS
from penstock.engine.reduce.pieces import cut
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.reduce.slices import portions_of
from penstock.engine.transport import Transport
from penstock.engine.transport.tags import FIRST_EXCHANGE


def begin_equal(rank: int, shared: SharedWeights, transport: Transport) -> None:
    """Give shared weights the values that their first holder has. For processes: each has built the
    model for itself, perhaps with other random numbers.

    They travel slice by slice on the channels of the sums, since a channel between hosts keeps as
    much memory ready as its largest message needed. All others answer: what leaves an accelerator
    may be overwritten behind something that its target has made of it, and the first update need
    not come behind any such thing.
    """
    first = shared.ranks[0]
    vectors = [parameter.detach().reshape(-1) for parameter in shared.parameters]
    portions = portions_of(dict(enumerate(shared.parameters)), shared.ranks, MOST_PORTIONS)
    waiting = f"rank {rank}, waiting for the weights that it shares with rank {first}"
    for index, portion in enumerate(portions):
        for number, (_, pieces) in enumerate(portion.slices, start=FIRST_EXCHANGE):
            if rank == first:
                values = [cut(vectors[piece.place], piece) for piece in pieces]
                for other in shared.others(rank):
                    transport.send(shared.edge(first, other, Purpose.SUM, index), number, values)
                continue
            edge = shared.edge(first, rank, Purpose.SUM, index)
            values = transport.recv(edge, number, waiting)
            for (place, start, stop), value in zip(pieces, values, strict=True):
                vectors[place][start:stop] = value
    if rank == first:
        for other in shared.others(rank) if vectors else ():
            waiting = f"rank {rank}, waiting for rank {other} to have the weights that both hold"
            transport.recv(shared.edge(other, first, Purpose.SUM), FIRST_EXCHANGE, waiting)
        return
    with torch.no_grad():
        for parameter, vector in zip(shared.parameters, vectors, strict=True):
            parameter.copy_(vector.view_as(parameter))
    if vectors:
        answer = vectors[0].new_zeros(1)
        transport.send(shared.edge(rank, first, Purpose.SUM), FIRST_EXCHANGE, answer)
