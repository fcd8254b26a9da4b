"""Freed memory that is kept within a limit, in a process of its own: the allocator is one."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
