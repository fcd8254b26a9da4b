"""Tiers hold what was written, say where they do not, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from penstock.base.errors import FileError, InputError, RunError
from penstock.core.cluster.parts import Tier
from penstock.core.schedule.residence import PAGE, whole_pages
from penstock.engine.weights import tiers
from penstock.engine.weights.buffers import BufferPool, MemoryBuffer
from penstock.engine.weights.tiers import DiskStore, opened


def filled(num_bytes, seed):
    buffer = MemoryBuffer(whole_pages(num_bytes))
    generator = np.random.default_rng(seed)
    buffer.view[:] = generator.bytes(buffer.num_bytes)
    return buffer


def read(store, extent, memory):
    for _ in store.reading(extent, memory):
        pass


@pytest.fixture(params=["disk", "host", "buffered", "named"])
def store(request, tmp_path, monkeypatch):
    if request.param in ("buffered", "named"):
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    kind = "host" if request.param == "host" else "disk"
    store = opened(Tier(kind=kind, folder="" if kind == "host" else str(tmp_path)))
    yield store
    store.close()


def test_what_was_written_is_read(store):
    extents = [store.reserve(f"part {size}", size) for size in (1, PAGE, 3 * PAGE + 5)]
    written = [filled(extent.num_bytes, seed) for seed, extent in enumerate(extents)]
    for extent, buffer in zip(extents, written, strict=True):
        store.write(extent, buffer.view)
    for extent, buffer in reversed([*zip(extents, written, strict=True)]):
        back = MemoryBuffer(extent.num_bytes)
        read(store, extent, back.view)
        assert back.bytes.equal(buffer.bytes)
    assert store.read_bytes == store.written_bytes == 6 * PAGE


def test_what_was_never_written_is_not_read(store):
    with pytest.raises(FileError, match="nothing was written"):
        read(store, store.reserve("weights of stage 1", 10), MemoryBuffer(PAGE).view)


@pytest.mark.parametrize("bit", [0, 77, 3 * PAGE * 8 - 1])
def test_any_flipped_bit_is_found_with_its_page(tmp_path, bit):
    store = DiskStore(str(tmp_path))
    store.reserve("something before", PAGE)
    extent = store.reserve("weights of stage 4", 3 * PAGE)
    buffer = filled(extent.num_bytes, 0)
    store.write(extent, buffer.view)
    buffer.view[bit // 8] ^= 1 << bit % 8
    store._put(extent, buffer.view)
    offset = PAGE + bit // 8 // PAGE * PAGE
    with pytest.raises(FileError, match=rf"weights of stage 4: .* offset {offset} "):
        read(store, extent, buffer.view)
    store.close()


def test_pages_that_changed_places_are_found(tmp_path):
    store = DiskStore(str(tmp_path))
    extent = store.reserve("state", 2 * PAGE)
    buffer = filled(extent.num_bytes, 0)
    store.write(extent, buffer.view)
    buffer.view[:] = bytes(buffer.view[PAGE:]) + bytes(buffer.view[:PAGE])
    store._put(extent, buffer.view)
    with pytest.raises(FileError, match="2 of 2 pages differ"):
        read(store, extent, buffer.view)
    store.close()


def test_a_full_disk_is_told_when_room_is_reserved(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = DiskStore(str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError, match=r"no room for 8 KiB of weights of stage 0.*are free"):
        store.reserve("weights of stage 0", 2 * PAGE)
    store.close()


@pytest.mark.parametrize(("move", "doing"), [("preadv", "read"), ("pwritev", "write")])
def test_an_error_of_the_disk_names_what_and_where(tmp_path, monkeypatch, move, doing):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    store = DiskStore(str(tmp_path))
    extent = store.reserve("weights of stage 2", PAGE)
    buffer = filled(PAGE, 0)
    store.write(extent, buffer.view)
    monkeypatch.setattr(tiers.os, move, broken)
    with pytest.raises(FileError, match=f"cannot {doing} the weights of stage 2 .*offset 0"):
        {"read": partial(read, store), "write": store.write}[doing](extent, buffer.view)
    store.close()


def test_a_file_that_was_cut_is_told(tmp_path):
    store = DiskStore(str(tmp_path))
    extent = store.reserve("weights of stage 2", PAGE)
    store.write(extent, filled(PAGE, 0).view)
    os.ftruncate(store._file, 0)
    with pytest.raises(FileError, match="ends at offset 0"):
        read(store, extent, MemoryBuffer(PAGE).view)
    store.close()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="is not there"):
        DiskStore(str(tmp_path / "absent"))


def test_main_memory_has_no_folder():
    with pytest.raises(InputError, match="has no folder"):
        Tier(kind="host", folder="/tmp")


_JOB = """
import os, sys
from penstock.core.schedule.residence import PAGE
from penstock.engine.weights.tiers import DiskStore
from penstock.engine.weights.buffers import MemoryBuffer
store = DiskStore(sys.argv[1])
store.write(store.reserve("weights", PAGE), MemoryBuffer(PAGE).view)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", _JOB, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_slabs_are_used_again_within_the_budget():
    buffers = BufferPool(4 * PAGE)
    first = buffers.take(2 * PAGE, "weights of stage 0")
    buffers.give(first)
    assert buffers.take(PAGE + 1, "weights of stage 1") is first
    second = buffers.take(PAGE, "weights of stage 2")
    with pytest.raises(RunError, match="no room for 8 KiB of weights of stage 3"):
        buffers.take(2 * PAGE, "weights of stage 3")
    buffers.give(second)
    # The free one goes, since it has another size.
    assert buffers.take(2 * PAGE, "weights of stage 3").num_bytes == 2 * PAGE
    assert buffers.peak_bytes == buffers.used_peak_bytes == 4 * PAGE


def test_what_is_counted_makes_free_slabs_go():
    buffers = BufferPool(2 * PAGE)
    buffers.give(buffers.take(PAGE, "weights"))
    buffers.count(2 * PAGE, "gradients")
    with pytest.raises(RunError):
        buffers.take(PAGE, "weights")
    buffers.count(-2 * PAGE)
    buffers.take(2 * PAGE, "weights")


def test_a_slab_knows_who_still_sees_it():
    buffer = MemoryBuffer(PAGE)
    assert not buffer.is_held
    view = buffer.bytes[:4]
    assert buffer.is_held
    del view
    assert not buffer.is_held
