"""What tells messages apart: no two kinds of them share a channel and a number."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from penstock import schedules
from penstock.core.schedule.lower import lower
from penstock.core.schedule.rounds import Segment
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.run.rank.program import RankProgram, SkipRoute
from penstock.engine.run.rank.worker import NUMBERS_PER_RUN
from penstock.engine.tensor.group import ChannelGroup
from penstock.engine.transport import base
from penstock.engine.transport.base import LARGEST_NUMBER

MANY = 2000
"""Groups of shared weights, skips: more than any model has."""
LANES = 16


def chain_tags():
    """Those of forwards and backwards between 64 ranks."""
    schedule = lower(schedules.build("gpipe", num_ranks=64, num_microbatches=1))
    segment = Segment.whole(schedule)
    return {edge.tag for rank in range(64) for edge in RankProgram(segment, rank).outgoing()}


def skip_tags():
    program = RankProgram(
        Segment.whole(lower(schedules.build("gpipe", num_ranks=2, num_microbatches=1))), 0
    )
    routes = [SkipRoute("skip", 0, 1, number) for number in range(MANY)]
    return {
        program.skip_edge(route, 0, backward=backward).tag
        for route in routes
        for backward in (False, True)
    }


def shared_tags(purpose):
    groups = [SharedWeights(number, (0, 1), frozenset({0}), ()) for number in range(MANY)]
    return {group.edge(0, 1, purpose, lane).tag for group in groups for lane in range(LANES)}


KINDS = {
    "the chain": (chain_tags, 2 * 63),
    "reports": (lambda: {base.REPORT_TAG}, 1),
    "agreements": (lambda: {base.AGREEMENT_TAG}, 1),
    "ends": (lambda: {base.END_TAG}, 1),
    "states": (lambda: {base.STATE_TAG}, 1),
    "orders": (lambda: {base.ORDER_TAG}, 1),
    "groups": (lambda: {edge.tag for edge in ChannelGroup(None, (0, 1), 0).outgoing()}, 1),
    "skips": (skip_tags, 2 * MANY),
    "gradients to sum": (lambda: shared_tags(Purpose.PART), LANES * MANY),
    "sums": (lambda: shared_tags(Purpose.SUM), LANES * MANY),
    "updated weights": (lambda: shared_tags(Purpose.WEIGHTS), LANES * MANY),
}
"""Kinds of messages: all tags that they have, and how many that must be."""


@pytest.mark.parametrize("kind", KINDS)
def test_all_messages_of_a_kind_have_channels_of_their_own(kind):
    tags_of, expected = KINDS[kind]
    assert len(tags_of()) == expected


def test_no_two_kinds_of_messages_share_a_channel():
    every = {kind: tags_of() for kind, (tags_of, _) in KINDS.items()}
    for (one, own), (other, others) in itertools.combinations(every.items(), 2):
        assert not own & others, f"{one} and {other}"


def test_every_tag_of_the_list_is_its_own():
    numbers = {name: value for name, value in vars(base).items() if name.endswith(("_TAG", "TAGS"))}
    assert len(numbers) >= 9
    assert [value for value, count in Counter(numbers.values()).items() if count > 1] == []
    # What the seals compare and the transports delay is told by which tags are below which.
    assert base.REPORT_TAG < base.SKIP_TAGS < base.SHARED_TAGS < base.RENEWED_TAGS


def test_no_attempt_has_the_numbers_of_what_belongs_to_no_microbatch():
    """An attempt that begins anew discards what is below its numbers: microbatches, and no sum."""
    attempts = 1_000_000  # weeks of training
    assert attempts * NUMBERS_PER_RUN < base.FIRST_EXCHANGE
    assert base.FIRST_EXCHANGE + attempts * NUMBERS_PER_RUN <= LARGEST_NUMBER
