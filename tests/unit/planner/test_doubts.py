"""Plans say how sure they are of what ranks of one machine cost each other."""

from __future__ import annotations

from msgspec.structs import replace

import penstock as pk
from penstock.graph import Contention
from tests.kit.planning import chain, devices

CROWD = replace(devices(2), memory_bytes=10**12)


def planned(whole, spread, cluster=CROWD, warnings=(), **request):
    contention = Contention(
        whole=whole, split=whole, stream=whole, whole_spread=spread, split_spread=spread,
        stream_spread=spread, num_ranks=2, num_rounds=4,
    )  # fmt: skip
    graph = replace(chain(6), contention=contention, warnings=warnings)
    return pk.plan(graph, cluster, microbatches=8, **request)


def test_a_plan_that_another_throw_would_change_says_so():
    found = planned(2.0, 0.2)
    assert len(found.stages) == 1
    (warning,) = found.warnings
    assert "the choice hangs on contention, 2.00 ± 20.0%" in warning
    assert "if it is less, 1.20" in warning and "--patience" in warning
    assert f"! {warning}" in str(found)
    # Asked for, one device hangs on nothing.
    assert not planned(2.0, 0.2, stages=1).warnings


def test_a_pipeline_may_hang_on_it_as_well():
    found = planned(1.6, 0.2)
    assert found.num_ranks == 2
    (warning,) = found.warnings
    assert "if it is more, 2.24, 1 stage with 1f1b would take" in warning


def test_a_steady_figure_raises_no_doubt_and_is_told():
    found = planned(1.1, 0.01)
    assert not found.warnings
    assert "passes take 1.10 ± 1.0% times as long" in str(found)
    assert pk.Plan.from_json(found.to_json()) == found


def test_what_the_profile_warns_of_counts_where_ranks_share_a_machine():
    assert planned(2.0, 0.0, warnings=("busy",)).warnings == ("busy",)
    apart = planned(2.0, 0.2, devices(2), warnings=("busy",))
    assert not apart.warnings and "share a machine" not in str(apart)
