"""Every benchmark can still be loaded: what it measures has not moved away from it."""

from __future__ import annotations

import importlib

import pytest

from tests.kit.paths import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_loaded(module):
    assert importlib.import_module(module).__doc__
