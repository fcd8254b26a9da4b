"""What is on its way between a rank's tier and its slabs."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from penstock.errors import DeadlineError, ModelError
from penstock.weights.group import Group
from penstock.weights.lane import Lane
from penstock.weights.slabs import Slab, Slabs
from penstock.weights.tiers import Store


class Transfers:
    """Brings groups of tensors in and lets them go: one read and one write at a time, beside
    compute. Marks like [2] are those of ``residence``.

    Args:
        store: the rank's tier.
        slabs: memory for what comes.
        seconds: how long a transfer may take.

    Attributes:
        store, slabs: as given.
    """

    def __init__(self, store: Store, slabs: Slabs, seconds: float) -> None:
        self.store = store
        self.slabs = slabs
        self._seconds = seconds
        self._stalls = False
        self._leaving: list[tuple[Group, Slab]] = []
        self._reader = Lane("penstock-fetching")
        self._writer = Lane("penstock-writing")

    def begin(self, group: Group) -> None:
        """Take a slab for a group and let the reader fill it, unless it is here or coming."""
        if group.slab is not None or not group.places:
            return
        slab = group.slab = self.slabs.take(group.num_bytes, group.whose)
        group.arriving = self._reader.begin(partial(self._read, group, slab, group.writing))

    def _read(self, group: Group, slab: Slab, before: Future[None] | None) -> None:
        if before is not None:
            before.result(self._seconds)
        assert group.extent is not None
        self.store.read(group.extent, slab.view)

    def arrive(self, group: Group) -> None:
        """Wait until a group that was begun is here, and point its tensors there. [3]

        Raises:
            FileError: it could not be read, or is not what was written.
            DeadlineError: it does not come.
        """
        if group.arriving is not None:
            self._await(group.arriving, group, "have not come from")
            group.arriving = None
            group.point()
        elif group.is_parked:
            group.point()

    def _await(self, future: Future[None], group: Group, what: str) -> None:
        try:
            # Who did not answer once is not waited for again while all is taken down.
            future.result(0 if self._stalls else self._seconds)
        except FutureTimeoutError:
            self._stalls = True
            raise DeadlineError(
                f"the {group.whose} {what} {self.store} within {self._seconds:g} s; raise "
                "deadline_seconds, or take a faster tier"
            ) from None

    def written(self, group: Group) -> None:
        """Wait until the tier has what was written of a group: its slab may change now.

        Raises:
            FileError: it could not be written.
            DeadlineError: it takes too long.
        """
        if group.writing is not None:
            self._await(group.writing, group, "were not written to")

    def let_go(self, group: Group, *, writes: bool, keeps: bool) -> None:
        """Take a group's values away. [6]

        Args:
            writes: whether they have changed, and are to be written first.
            keeps: whether the slab keeps them all the same, because they are needed next: between
                steps nobody may think that what has left could be changed.
        """
        slab = group.slab
        if slab is None:
            return
        if group.arriving is not None:
            self.arrive(group)
        if writes:
            assert group.extent is not None
            group.writing = self._writer.begin(partial(self.store.write, group.extent, slab.view))
        group.blank()
        if keeps:
            group.is_parked = True
            return
        group.slab = None
        group.is_parked = False
        if writes:
            self._leaving.append((group, slab))
            return
        self.written(group)  # what was kept here may still be on its way
        self.give(slab, group)

    def give(self, slab: Slab, group: Group) -> None:
        """Let a slab be used again that a group has left.

        Raises:
            ModelError: something still sees weights there.
        """
        if not slab.is_held:
            self.slabs.give(slab)
            return
        self.slabs.drop(slab)  # [8]
        if group.has_parameters:
            raise ModelError(
                f"something still sees the {group.whose} when they leave memory: a layer hands on "
                "a view of a parameter, or keeps one; let it hand on a copy (parameter.clone()), "
                "or put it into one stage with those that read it"
            )

    def finish(self) -> None:
        """Wait until what has left is written, and take its slabs back.

        Raises:
            FileError: it could not be written.
            DeadlineError: it takes too long.
        """
        leaving, self._leaving = self._leaving, []
        for group, slab in leaving:
            try:
                self.written(group)
            except BaseException:
                self.slabs.drop(slab)
                raise
            self.give(slab, group)

    def close(self) -> None:
        """End the threads, behind what they were given."""
        self._reader.close()
        self._writer.close()
