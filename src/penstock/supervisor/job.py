"""What a supervisor is asked for, and what each rank finds in its environment."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field

from penstock.run.logbook import VARIABLE
from penstock.supervisor.script import Script
from penstock.values import number, whole


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
        name: of the job, which no other has.

    Raises:
        InputError: a number that makes no sense.
    """

    script: Script
    num_ranks: int
    restarts: int = 0
    grace_seconds: float = 5.0
    name: str = field(default_factory=_new_name)

    def __post_init__(self) -> None:
        whole("the number of ranks", self.num_ranks, 1)
        whole("restarts", self.restarts, 0)
        number("grace_seconds", self.grace_seconds)

    def environment(self, rank: int, attempt: int, port: int, logbook: int) -> dict[str, str]:
        """What torchrun would tell a rank, and where the rank's logbook is.

        Args:
            rank: this process's.
            attempt: how often all ranks were started before.
            port: where the store of the attempt is.
            logbook: the descriptor of the pages of all ranks.
        """
        count = str(self.num_ranks)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
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
        }
