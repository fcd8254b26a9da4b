"""Where processes write why they failed, so that others can say more than that somebody is gone."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.run.drive.driver import told
from penstock.engine.transport.packing import short
from penstock.engine.transport.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_HEARSAY_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.01


class Board:
    """Where ranks write why they failed, beside the channels.

    gloo ends all connections of a rank whose wait runs out, so that its neighbours hear nothing but
    that it is gone; and of ranks that wait for each other in a row, all run out at once.

    Args:
        meeting: where all ranks have built the pipeline.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._others = [rank for rank in range(meeting.num_ranks) if rank != meeting.rank]

    def write(self, notice: str) -> None:
        """Tell those who will look."""
        key, text = _key(self._meeting.rank), short(notice).decode()
        with suppress(RunError):  # the store may be gone with the rank that kept it
            self._meeting.ask(lambda store: store.set(key, text))

    def explained(self, error: PeerError | DeadlineError) -> PeerError | DeadlineError:
        """The error, with what other ranks have said about the cause, if it was not known."""
        heard = self._hear()
        own = f"rank {self._meeting.rank} failed"  # as others have heard from this rank
        news = {
            notice
            for notice in heard.values()
            if notice not in told(error) and not notice.startswith(own)
        }
        if isinstance(error, DeadlineError):
            silent = [str(other) for other in self._others if other not in heard]
            news |= {f"nothing was heard of rank {' and '.join(silent)}"} if silent else set()
        if not news:
            return error
        message = f"{error}; meanwhile {', '.join(sorted(news))}"
        if isinstance(error, PeerError):
            return PeerError(message, error.reason)
        return DeadlineError(message)

    def _hear(self) -> dict[int, str]:
        """What others have written; some do so only now."""
        heard: dict[int, str] = {}
        with suppress(RunError):
            self._meeting.ask(partial(self._look, heard), _HEARSAY_SECONDS)
        return dict(heard)

    def _look(self, heard: dict[int, str], store: Store) -> None:
        end = time.monotonic() + _HEARSAY_SECONDS
        while len(heard) < len(self._others) and time.monotonic() < end:
            for other in self._others:
                if other not in heard and store.check([_key(other)]):
                    heard[other] = store.get(_key(other)).decode()
            time.sleep(_LOOK_AGAIN_SECONDS)


def _key(rank: int) -> str:
    return f"why rank {rank} failed"
