"""What every rank of a job needs, and each would otherwise compute for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist


def spread(computations: Sequence[Callable[[], object]]) -> list[object]:
    """The results of all computations on every rank; each is made by one of them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gathered: list = [None] * num_ranks
    dist.all_gather_object(gathered, [compute() for compute in computations[rank::num_ranks]])
    return [gathered[index % num_ranks][index // num_ranks] for index in range(len(computations))]
