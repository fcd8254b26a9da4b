"""What a rank notes is there for whoever has its page, and only for the rank itself to write."""

from __future__ import annotations

import mmap
import os

import pytest

from penstock.engine.run.logbook import PAGE_BYTES, VARIABLE, Logbook, Notes, ScriptFailure

NOTHING = Notes(None, None, None, None)


@pytest.fixture
def pages():
    """The descriptor of two pages, and what reads one of them."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * PAGE_BYTES)

    def read(number):
        with mmap.mmap(descriptor, PAGE_BYTES, offset=number * PAGE_BYTES) as page:
            return Logbook(page).read()

    yield descriptor, read
    os.close(descriptor)


def told(descriptor, number, process=None):
    return {VARIABLE: f"{process or os.getpid()}:{descriptor}:{number}"}


def test_a_page_that_nobody_has_written_says_nothing(pages):
    _, read = pages
    assert read(0) == NOTHING


def test_notes_stand_on_the_page_of_their_rank(pages):
    descriptor, read = pages
    logbook = Logbook.of_this_process(told(descriptor, 1))
    logbook.begin(0)
    assert (read(1).first_step, read(1).step) == (0, 0)
    logbook.reach(1)
    logbook.begin(1)
    logbook.build()
    logbook.fail(ScriptFailure("rank 1 failed: boom", followed=False))
    notes = read(1)
    assert notes.built > 0
    assert (notes.first_step, notes.step) == (0, 1)
    assert notes.failure == ScriptFailure("rank 1 failed: boom", followed=False)
    assert read(0) == NOTHING


def test_the_first_step_is_that_of_the_first_pipeline(pages):
    descriptor, read = pages
    for step in (40, 70):
        Logbook.of_this_process(told(descriptor, 0)).begin(step)
    assert (read(0).first_step, read(0).step) == (40, 70)


@pytest.mark.parametrize("reason", ["x" * 10**6, "\0" * 10**6, "\U0001f600" * 10**6, "\udc80"])
def test_whatever_a_failure_says_fits_on_the_page(pages, reason):
    descriptor, read = pages
    logbook = Logbook.of_this_process(told(descriptor, 0))
    logbook.fail(ScriptFailure("a longer reason than the last one", followed=True))
    logbook.fail(ScriptFailure(reason, followed=False))
    written = read(0).failure
    assert not written.followed
    assert reason.startswith(written.reason.replace("?", "\udc80"))
    assert read(1) == NOTHING


def test_a_process_that_a_rank_has_started_does_not_write_for_it(pages):
    descriptor, read = pages
    for environment in (told(descriptor, 0, process=1), {}, {VARIABLE: "?"}, told(10**6, 0)):
        Logbook.of_this_process(environment).begin(3)
    assert read(0) == NOTHING
