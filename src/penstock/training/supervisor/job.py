"""What a supervisor is asked for, and what each rank finds in its environment."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field, replace

from penstock.base.values import number, whole
from penstock.engine.run.logbook import VARIABLE
from penstock.engine.transport import rendezvous
from penstock.training.supervisor.script import Script


def _new_name() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Job:
    """A script on some ranks of this host.

    Attributes:
        script: what every rank runs.
        num_ranks: how many processes there are.
        restarts: how often ranks may be started again.
        grace_seconds: how long ranks that are asked to end may take before they are killed.
        elastic: whether the job goes on with fewer ranks when a slot is lost for good.
        slots: the places on this host that ranks take, which are their ``LOCAL_RANK``; by default
            as many as there are ranks.
        name: of the job, which no other has.

    Raises:
        InputError: a number that makes no sense.
    """

    script: Script
    num_ranks: int
    restarts: int = 0
    grace_seconds: float = 5.0
    elastic: bool = False
    slots: tuple[int, ...] = ()
    name: str = field(default_factory=_new_name)

    def __post_init__(self) -> None:
        whole("the number of ranks", self.num_ranks, 1)
        whole("restarts", self.restarts, 0)
        number("grace_seconds", self.grace_seconds)
        if not self.slots:
            object.__setattr__(self, "slots", tuple(range(self.num_ranks)))

    def without(self, rank: int) -> Job:
        """The same job on one rank fewer; nobody takes the slot of this one any more."""
        slots = self.slots[:rank] + self.slots[rank + 1 :]
        return replace(self, num_ranks=self.num_ranks - 1, slots=slots)

    def environment(
        self, rank: int, attempt: int, port: int, logbook: int, store: int
    ) -> dict[str, str]:
        """What torchrun would tell a rank, and where its logbook is and it meets the others.

        Args:
            rank: this process's.
            attempt: how often all ranks were started before.
            port: where torch's store of the attempt is.
            logbook: the descriptor of the pages of all ranks.
            store: that of the store that nobody else can open.
        """
        count = str(self.num_ranks)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.slots[rank]),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "ROLE_WORLD_SIZE": count,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.restarts),
            "TORCHELASTIC_RUN_ID": self.name,
            # Ranks are clients of a store, and none of them keeps it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            VARIABLE: f"{os.getpid()}:{logbook}:{rank}",
            rendezvous.STORE_VARIABLE: rendezvous.told_to_rank(store, self.num_ranks),
        }
