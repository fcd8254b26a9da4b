"""The ring: entries in order, none lost or overwritten, and nobody asleep while there is one."""

from __future__ import annotations

import mmap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.transport.link import HAS_RINGS, RING_BYTES, RingReader, RingWriter

pytestmark = pytest.mark.skipif(not HAS_RINGS, reason="stores are seen in order on x86-64 only")

NUM_ENTRIES = 1024


def both_ends():
    memory = mmap.mmap(-1, RING_BYTES)
    return RingWriter(memory), RingReader(memory)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=20))
def test_entries_come_once_in_order_and_none_is_overwritten(turns):
    """Turns of writing and reading, of as many entries as there is room for."""
    writer, reader = both_ends()
    written = read = 0
    for writes, count in turns:
        for _ in range(count):
            if writes:
                accepted = writer.put(written, -written, 2**62 - 1 - written, 7)
                assert accepted == (written - read < NUM_ENTRIES)
                written += accepted
            else:
                assert reader.has_news() == (read < written)
                entry = reader.take()
                if read == written:
                    assert entry is None
                else:
                    assert entry == (read, -read, 2**62 - 1 - read, 7)
                    read += 1


def test_a_reader_that_sleeps_is_woken_for_every_entry_it_has_not_seen():
    """Each side at its own pace; a wake-up that was missed would stop the reader for good."""
    writer, reader = both_ends()
    bell = threading.Semaphore(0)
    num_entries, seen = 50_000, []

    def read():
        while len(seen) < num_entries:
            if entry := reader.take():
                seen.append(entry.number)
                continue
            reader.fall_asleep()
            if not reader.has_news() and not bell.acquire(timeout=60):
                return
            reader.wake()

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(num_entries):
        while not writer.put(0, 0, number, 0):
            bell.release()
        if writer.must_wake():
            bell.release()
    thread.join()
    assert seen == list(range(num_entries))
