"""Freed memory that is kept within a budget, each in a process of its own: the allocator is one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")

_TOOLS = """
import resource
import torch
from penstock.device.allocator import KeptPages, keep_freed_pages, return_freed_pages

MIB = 1 << 20

def blocks(count):
    return [torch.ones(4 * MIB) for _ in range(count)]  # of 16 MiB

def faults(number=1):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(number):
        blocks(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * resource.getpagesize()

return_freed_pages()
blocks(1)
"""


def run(code):
    """The last line that a script says."""
    script = _TOOLS + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_what_is_freed_is_used_again_without_a_fault():
    code = """
        again = faults(10)
        kept = KeptPages.within(512 * MIB)
        faults(10)
        print(faults(10) * 10 < again)
    """
    assert run(code) == "True"


def test_what_is_kept_goes_back_when_there_is_too_much():
    code = """
        kept = KeptPages.within(64 * MIB)
        before = resident()
        blocks(8)
        much = resident() - before
        kept.mind()
        print(much > 100 * MIB, resident() - before < 32 * MIB)
    """
    assert run(code) == "True True"


def test_it_is_kept_no_more_where_somebody_else_needs_the_room():
    code = """
        kept = KeptPages.within(64 * MIB)
        others = blocks(8)
        kept.mind()
        before = resident()
        blocks(8)
        print(resident() - before < 32 * MIB, KeptPages.within(1) is not None)
    """
    assert run(code) == "True True"


def test_there_is_one_at_a_time():
    code = """
        kept = KeptPages.within(512 * MIB)
        second = KeptPages.within(512 * MIB)
        kept.end()
        kept.end()
        print(kept is not None, second, KeptPages.within(512 * MIB) is not None)
    """
    assert run(code) == "True None True"


@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_where_the_system_counts_addresses_all_goes_back_at_once(kind):
    code = f"""
        resource.setrlimit(resource.{kind}, (1 << 40, 1 << 40))
        print(KeptPages.within(512 * MIB))
    """
    assert run(code) == "None"
