"""Bells ring for workers that know the secret, and for nobody else."""

from __future__ import annotations

import queue
import socket

import pytest

from penstock.base.errors import RunError
from penstock.core.summation.frames import FrameHead, FrameKind, Member, key_of
from penstock.core.summation.listener import Bell, Ring, Ringer

KEY = key_of("secret", "")
GROUP = 3
WAIT_SECONDS = 30


@pytest.fixture
def heard():
    return queue.SimpleQueue()


@pytest.fixture
def bell(heard):
    bell = Bell("127.0.0.1", KEY, GROUP, 2, heard)
    yield bell
    bell.close()


def member(place=0, **other):
    return Member(bytes(16), GROUP, place, 2)._replace(**other)


def test_rings_are_heard_in_their_order_and_so_is_the_end(bell, heard):
    first, second = (Ringer(bell.address, member(place), KEY) for place in (0, 1))
    for ringer, place in ((second, 1), (first, 0), (second, 1)):
        ringer.ring(7)
        assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, place)
    first.close()
    assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, 0, has_left=True)
    second.close()


def test_who_does_not_know_the_secret_is_refused(bell):
    with pytest.raises(RunError, match="the secret or the name of the job is another one"):
        Ringer(bell.address, member(), key_of("guess", ""))


def test_nobody_rings_for_another(bell, heard):
    known = Ringer(bell.address, member(), KEY)
    strangers = [member(), member(1, group=4), member(1, num_members=5)]
    others = [Ringer(bell.address, who, KEY) for who in strangers]
    for ringer in (*others, known):
        ringer.ring(1)
    assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, 0)
    for ringer in (known, *others):
        ringer.close()
    assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, 0, has_left=True)
    assert heard.empty()


@pytest.mark.parametrize(
    "lie", [b"x" * 40, FrameHead(FrameKind.PUSH, length=4).packed()], ids=["noise", "numbers"]
)
def test_who_lies_is_as_gone_and_others_are_heard(bell, heard, lie):
    liar, other = (Ringer(bell.address, member(place), KEY) for place in (0, 1))
    liar._connection.sendall(lie)
    assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, 0, has_left=True)
    with socket.create_connection(bell.address) as stranger:
        stranger.sendall(lie)
    other.ring(1)
    assert heard.get(timeout=WAIT_SECONDS) == Ring(GROUP, 1)
    for ringer in (liar, other):
        ringer.close()


def test_nobody_there_is_said(bell):
    bell.close()
    with pytest.raises(RunError, match=r"the parameter server at 127.0.0.1:.* can't be reached"):
        Ringer(bell.address, member(), KEY)
