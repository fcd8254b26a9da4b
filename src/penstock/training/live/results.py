"""Takes what a stream gives: results in the order of their frames, and the news between them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from penstock.base.errors import InputError, RunError
from penstock.training.live.frames import News, Result
from penstock.training.live.ledger import Ledger
from penstock.training.live.loop import Arrival, Loop


class Results:
    """What has left the last stage, for whoever takes it.

    Args:
        loop: puts arrivals and news in their order.
        ledger: is told of each result that is taken.

    Attributes:
        num_taken: how many results somebody has taken.
        closed: whether the stream is over in this process.
    """

    def __init__(self, loop: Loop, ledger: Ledger) -> None:
        self.num_taken = 0
        self.closed = False
        self._loop = loop
        self._ledger = ledger
        self._set_aside: News | None = None

    def close(self) -> None:
        """The stream is over: whoever waits for a result waits no more."""
        self.closed = True
        self._loop.arrivals.put(News.CHANGED)

    def check_open(self) -> None:
        """Raise ``InputError`` if the stream is over in this process."""
        if self.closed:
            raise InputError("this stream is closed; make a new one")

    def at_once(self) -> Result | None:
        """The next result; ``None`` if there is none yet."""
        self.check_open()
        paused: News | None = None
        while (news := self._news(wait=False)) is not None:
            if isinstance(news, Arrival):
                return self._taken(news)
            if news is not News.CHANGED:
                paused = news
            if news is News.ENDED:
                break
        self._set_aside = paused  # for who takes all that is under way
        self._loop.raise_failure()
        return None

    def next(self) -> Result:
        """Wait for the next result.

        Raises:
            RunError: no more will come; or the first failure of any rank.
        """
        while True:
            news = self._news()
            if isinstance(news, Arrival):
                return self._taken(news)
            if news is News.ENDED:
                self._set_aside = news
                raise RunError(
                    f"{self._loop.name} waits for the result of another frame, but rank 0 has left "
                    "the stream; all processes must call it equally often"
                )
            self.check_open()
            self._loop.raise_failure()

    def until(self, is_over: Callable[[], bool]) -> Iterator[Result]:
        """Results, until a condition holds that news tell of, or the stream is closed."""
        while not is_over():
            news = self._news()
            if isinstance(news, Arrival):
                yield self._taken(news)
            elif self.closed:
                return
            else:
                self._loop.raise_failure()

    def followed(self) -> Iterator[Result]:
        """Results, until rank 0 has taken all that were under way there, or has left."""
        while True:
            news = self._news()
            if isinstance(news, Arrival):
                yield self._taken(news)
            elif news is News.CHANGED and not self.closed:
                self._loop.raise_failure()
            else:
                self._set_aside = news if news is News.ENDED else None
                return

    def _news(self, *, wait: bool = True) -> Arrival | News | None:
        """What has come; ``None`` if nothing has, and nobody waits."""
        if self._set_aside is not None:
            news, self._set_aside = self._set_aside, None
            return news
        try:
            return self._loop.arrivals.get(block=wait)
        except queue.Empty:
            return None

    def _taken(self, arrival: Arrival) -> Result:
        result = arrival.settled()
        self.num_taken += 1
        self._loop.taken()
        self._ledger.told(result, None if result.loss is None else float(result.loss))
        return result
