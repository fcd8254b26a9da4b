"""Which pieces of a checkpoint the ranks of this process have, and which of them they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from penstock.engine.run.assembly import Assembly
from penstock.engine.run.rank.work import PendingGradient
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.seating import RankSeat
from penstock.engine.stage.stage import Stage
from penstock.planning.plans.serving import servers_of
from penstock.training.checkpoint.division import Division
from penstock.training.checkpoint.taking import TrainedStage


class PiecesHere:
    """The stages of a pipeline's ranks in this process, as pieces of a checkpoint.

    Args:
        parts: the pipeline.
    """

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def trained(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages of each rank of this process."""
        for worker in self._parts.workers:
            updater = worker.updater
            for index, stage in worker.stages.items():
                assert isinstance(stage, Stage)
                optimizer = updater.optimizers.get(index)
                yield (
                    worker,
                    TrainedStage(
                        stage,
                        updater.holdings[index].named,
                        optimizer,
                        updater.schedulers.get(index),
                        updater.rates[index],
                        worker.stores.get(index),
                        partial(_letters, worker),
                        self._division(index, worker.seat),
                        updater.shards.of,
                        () if optimizer is None else updater.shards.groups_of(optimizer),
                        *self._part(worker.rank, index),
                    ),
                )

    def _division(self, stage: int, seat: RankSeat) -> Division | None:
        sharings = self._parts.layout.sharings
        if sharings is None:
            return None
        return Division(
            sharings.cut_keys,
            sharings.shapes,
            sharings.num_blocks[stage],
            seat.coordinate,
            seat.size,
        )

    def _part(self, rank: int, stage: int) -> tuple[int, int]:
        """(which of a stage's copies a rank has, how many pieces the stage has): copies are equal,
        and one is written, unless each rank has a part of the optimizer's state."""
        copies = sorted(self._parts.plan.placement.ranks_of(stage))
        servers = servers_of(self._parts.plan, stage)
        if not servers:
            return copies.index(rank), len(copies) if self._is_sharded else 1
        # The first piece has the weights, each of the others what one parameter server keeps.
        if rank in servers:
            return 1 + servers.index(rank), 1 + len(servers)
        return (0 if rank == copies[0] else 1 + len(servers)), 1 + len(servers)

    @property
    def _is_sharded(self) -> bool:
        return self._parts.in_processes and self._parts.plan.summing.reducer == "sharded"

    def written(self) -> Iterator[TrainedStage]:
        """The stages that are written here."""
        return (trained for _, trained in self.held())

    def held(self) -> Iterator[tuple[Worker, TrainedStage]]:
        """The stages that are written here, and the workers that have them."""
        for worker, trained in self.trained():
            if trained.part < trained.num_parts:
                yield worker, trained

    @property
    def with_first_rank(self) -> bool:
        """Whether the rank that writes what is no stage's is in this process."""
        return any(worker.seat.number == 0 for worker in self._parts.workers)

    def counts(self) -> list[int]:
        """How many pieces each stage of the plan has."""
        plan, sharings = self._parts.plan, self._parts.layout.sharings
        blocks = [1] * len(plan.stages) if sharings is None else sharings.num_blocks
        return [
            stage.tensor_ranks * many * self._part(plan.placement.ranks_of(index)[0], index)[1]
            for index, (stage, many) in enumerate(zip(plan.stages, blocks, strict=True))
        ]


def _letters(worker: Worker) -> Sequence[PendingGradient]:
    return worker.pending_gradients
