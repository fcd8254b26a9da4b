"""Memory from the system: what is freed is kept within a limit, in a process of its own, since the
allocator is one; what comes and goes has huge pages."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from penstock.engine.weights.buffers import MemoryBuffer
from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT

_SCRIPT = """
import resource
import torch
from penstock.engine.device.memory import KeptPages, _resident_bytes, return_freed_pages

MIB = 1 << 20

def blocks(count):
    return [torch.ones(4 * MIB) for _ in range(count)]  # of 16 MiB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

return_freed_pages()
again = faults()
kept = KeptPages(256 * MIB, lambda: 0)
faults()
used = faults()
kept.mind()
print(used * 3 < again, faults() * 3 < again)
before = _resident_bytes()
blocks(20)
much = _resident_bytes() - before
kept.mind()
print(much > 200 * MIB, _resident_bytes() - before < 32 * MIB)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_is_freed_is_used_again_and_goes_back_when_there_is_too_much():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr or done.stdout


_NUM_BYTES = 16 << 20


def faults_of(memory):
    """How many faults it takes to write to all of some memory for the first time."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no system with huge pages")
def test_buffers_have_huge_pages_where_the_system_has_some():
    plain = mmap.mmap(-1, _NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        plain.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pytest.skip("this system has no huge pages")
    few = _NUM_BYTES // mmap.PAGESIZE // 4
    if faults_of(memoryview(plain)) > few:
        pytest.skip("this system has no huge pages left")
    assert faults_of(MemoryBuffer(_NUM_BYTES).view) < few
