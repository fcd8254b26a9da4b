"""Which job a free device takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["longest", "fair", "whole"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True)
class Standing:
    """Where a job stands that waits for a device.

    Attributes:
        number: of the job; the lower one wins where all else is equal.
        left: seconds of compute until the next decision about it, or its end.
        share: how much of the work until then is done, from 0 to 1.
        home: the device that began it, if it stays there.
        only: the device on which alone it can compute, if there is one.
    """

    number: int
    left: float
    share: float = 0.0
    home: int | None = None
    only: int | None = None


def choose(
    policy: PolicyName, device: int, waiting: Sequence[Standing], owned: Collection[int] = ()
) -> Standing | None:
    """The job that a free device takes, or ``None`` if it rather waits.

    Args:
        policy: ``"longest"`` takes the job with the longest remaining time (Hydra's Sharded-LRTF);
            ``"fair"`` the one of whose work the smallest share is done; ``"whole"`` stays with a
            job until its end, and then takes the longest that nobody has begun.
        device: its number.
        waiting: jobs that could go on now.
        owned: the devices that have begun a job which has not ended, for ``"whole"``.

    >>> waiting = [Standing(0, left=3.0, share=0.1), Standing(1, left=5.0, share=0.5)]
    >>> choose("longest", 0, waiting).number, choose("fair", 0, waiting).number
    (1, 0)
    """
    waiting = [one for one in waiting if one.only in (None, device)]
    if policy == "fair":
        return min(waiting, key=lambda one: (one.share, -one.left, one.number), default=None)
    if policy == "whole":
        own = [one for one in waiting if one.home == device]
        if own or device in owned:
            return own[0] if own else None
        waiting = [one for one in waiting if one.home is None]
    return max(waiting, key=lambda one: (one.left, -one.number), default=None)


def guess(
    policy: PolicyName,
    device: int,
    waiting: Sequence[Standing],
    fetched: Collection[int],
    num_devices: int,
    owned: Collection[int] = (),
) -> Standing | None:
    """The job whose stage is to be fetched for a device while that is still busy; ``None`` where
    the stage that comes next is most likely in memory, or enough others are.

    Args:
        waiting: jobs that wait, and the one that has the device, as it will stand then.
        fetched: numbers of those that wait with their stage in memory: one for each other device,
            the others are for this one.
        num_devices: as many jobs may wait so.
    """
    if len(fetched) >= num_devices:
        return None
    left = list(waiting)
    for _ in range(num_devices):
        chosen = choose(policy, device, left, owned)
        if chosen is None or chosen.number not in fetched:
            return chosen
        left.remove(chosen)
    return None
