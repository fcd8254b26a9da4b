"""The command that mutates tells what tests notice from what they do not, and what never ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak import mutations
from tests.soak.mutations import Copy, Place, places

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

TESTS = ["tests/unit/reduce/test_buckets.py"]
NOTICED = ("engine/reduce/buckets.py", "added", "total.add_(gradient) → pass")
"""The key of a place that these tests notice."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("copy"), seed=1)


def noticed():
    (place,) = (place for place in places("engine/reduce") if place.key == NOTICED)
    return place


def test_what_tests_notice_is_caught_and_undone(copy):
    place = noticed()
    with copy.mutated(place):
        outcome = copy.tried(TESTS)
    assert outcome.verdict == "test"
    assert outcome.by.startswith(TESTS[0])
    assert copy.tried(TESTS).verdict == "survived"


@pytest.mark.parametrize(
    ("endless", "per_test", "seconds"),
    [("[one for one in iter(int, 1) if one]", 20, 300), ("any(iter(int, 1))", 60, 60)],
)
def test_what_never_ends_is_told_apart(endless, per_test, seconds, copy, monkeypatch):
    monkeypatch.setattr(mutations, "SECONDS_PER_TEST", per_test)
    place = noticed()
    mutation = replace(place.mutation, after=endless)
    with copy.mutated(Place(place.room, place.file, mutation)):
        assert copy.tried(TESTS, seconds).verdict == "timeout"
