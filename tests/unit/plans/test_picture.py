"""The picture of a plan: devices, stages, what goes between them, memory, and its three forms."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from penstock import errors, versions
from penstock.core.cluster import Device
from penstock.core.schedule import families
from penstock.core.schedule.op import Kind
from penstock.drawing import draw_plan
from penstock.drawing.markup import wrapped
from penstock.drawing.plan_picture import shortened_layers
from penstock.drawing.plan_svg import plan_svg
from penstock.drawing.plan_text import plan_text
from penstock.planning.plans import Alternative, Plan, StagePlan
from penstock.planning.plans.picture import picture_of
from tests.kit.command_line import run
from tests.kit.paths import DOCS, GOLDEN

GOLDEN_PLAN = GOLDEN / "plan_vgg_2-1.txt"
IMAGES = DOCS / "images"
SVG = "{http://www.w3.org/2000/svg}"
MIB = 1 << 20


def stage(index, rank, **more):
    return StagePlan(
        **{
            "layers": tuple(f"block.{3 * index + k}" for k in range(3)),
            "rank": rank,
            "forward_seconds": 0.003,
            "backward_input_seconds": 0.003,
            "backward_weight_seconds": 0.002,
            "update_seconds": 0.004,
            "hop_seconds": 0.0005,
            "transfer_bytes": 3 * MIB,
            "parameter_bytes": 40 * MIB,
            "optimizer_bytes": 80 * MIB,
            "buffer_bytes": MIB,
            "workspace_bytes": 4 * MIB,
            "activation_bytes": 30 * MIB,
            "input_bytes": 3 * MIB,
            **more,
        }
    )


def made(schedule="1f1b", ranks=2, count=8, memory=0, **more) -> Plan:
    """A plan with a stage for every place that the schedule has."""
    built = families.build(schedule, num_ranks=ranks, num_microbatches=count, **more)
    return Plan(
        model="m",
        schedule=schedule,
        options=more,
        num_microbatches=count,
        stages=tuple(stage(k, built.ranks_of(k)[-1]) for k in range(built.num_stages)),
        devices=tuple(Device(name=f"gpu{k}", memory_bytes=memory) for k in range(ranks)),
    )


REPLICATED = Plan(
    model="m",
    schedule="1f1b",
    options={"replicas": "2-1"},
    num_microbatches=8,
    microbatch_size=16,
    stages=(
        stage(0, 0, forward_seconds=0.006, reduce_seconds=0.02),
        stage(1, 2, layers=("fc6",), recompute="stage", parameter_bytes=100 * MIB),
    ),
    devices=tuple(Device(name=f"gpu{k}", memory_bytes=250 * MIB) for k in range(3)),
    reason="Convolutions on two devices, because they have most of the work and few weights.",
    alternatives=(
        Alternative(label="data parallel", description="1 stage, 3 replicas", step_seconds=0.0812,
                    memory_bytes=900 * MIB, moved_bytes=1 << 30, remark="its gradients are large"),
        Alternative(label="best asynchronous", description="pipedream 2-1", step_seconds=0.05,
                    bubble=0.0, memory_bytes=700 * MIB, moved_bytes=MIB, delay=1.5),
    ),
)  # fmt: skip


def test_the_text_is_as_on_record():
    assert plan_text(picture_of(REPLICATED)) + "\n" == GOLDEN_PLAN.read_text()


def test_replicas_are_one_stage_on_several_rows_and_each_does_its_share():
    picture = picture_of(REPLICATED)
    first, second = picture.groups
    assert [heading.stage for heading in first.headings] == [0]
    assert [device.name for device in first.devices] == ["gpu0", "gpu1"]
    assert "2 replicas in turns" in first.headings[0].remarks
    for rank in first.ranks:
        assert dict(rank.blocks[0].parts) == pytest.approx(
            {Kind.FORWARD: 0.003, Kind.BACKWARD: 0.0025, Kind.UPDATE: 0.004 / 8}
        )
    assert dict(second.ranks[0].blocks[0].parts)[Kind.RECOMPUTE] == 0.003
    assert picture.beat == second.ranks[0].seconds == pytest.approx(0.003 + 0.003 + 0.005 + 0.0005)
    (flow,) = picture.flows
    assert (flow.source, flow.target, flow.stages) == (0, 1, (0,))
    assert flow.words == "0→1: 3\N{NO-BREAK SPACE}MiB in 500\N{NO-BREAK SPACE}µs"


@pytest.mark.parametrize(
    ("schedule", "options", "down", "up", "far"),
    [
        ("1f1b", {}, {(0, 1): (0,), (1, 2): (1,)}, {}, {}),
        (
            "interleaved-1f1b", {"stages_per_rank": 3},
            {(0, 1): (0, 3, 6), (1, 2): (1, 4, 7)}, {}, {(2, 0): (2, 5)},
        ),
        ("zb-v", {}, {(0, 1): (0,), (1, 2): (1,)}, {(1, 0): (4,), (2, 1): (3,)}, {}),
    ],
)  # fmt: skip
def test_flows_are_those_of_the_schedule(schedule, options, down, up, far):
    picture = picture_of(made(schedule, ranks=3, count=9, **options))
    found = {(flow.source, flow.target): flow.stages for flow in picture.flows}
    assert found == {**down, **up, **far}
    assert {(flow.source, flow.target) for flow in picture.far_flows} == set(far)
    near = [flow for above in range(2) for flow in picture.neighbours(above)]
    assert {(flow.source, flow.target) for flow in near} == {*down, *up}
    assert len(near) == len(down) + len(up)


def test_a_stage_with_copies_says_where_the_other_is():
    picture = picture_of(made("chimera", ranks=4))
    assert all(len(group.headings) == 2 for group in picture.groups)
    assert "also on rank 3" in picture.groups[0].headings[0].remarks
    # Each copy takes half of the microbatches.
    assert dict(picture.ranks[0].blocks[0].parts)[Kind.FORWARD] == pytest.approx(0.0015)


def test_devices_that_share_layers_have_one_block():
    base = made(ranks=2)
    splits = {"block.3": "column", "block.4": "row", "block.5": "row"}
    split = stage(1, 1, tensor_ranks=2, splits=splits)
    plan = Plan(
        model="m", schedule="1f1b", num_microbatches=8,
        stages=(replace(base.stages[0], tensor_ranks=2), split),
        devices=tuple(Device(name=f"gpu{k}", speed=1 + k % 2) for k in range(4)),
    )  # fmt: skip
    picture = picture_of(plan)
    assert [len(rank.devices) for rank in picture.ranks] == [2, 2]
    assert [device.name for device in picture.devices] == [
        "gpu0", "gpu1 (2×)", "gpu2", "gpu3 (2×)",
    ]  # fmt: skip
    assert (
        "layers over 2 devices: 2 by inputs, 1 by outputs" in picture.groups[1].headings[0].remarks
    )
    blocks = blocks_of(plan_svg(picture))
    assert len(blocks) == 6  # F, B, U of each rank, not of each device
    assert {block.find(f"{SVG}rect").get("height") for block in blocks} == {"44"}
    nameless = picture_of(Plan(**{**fields(plan), "devices": ()}))
    assert [one.name for one in nameless.devices] == [
        "rank 0.0",
        "rank 0.1",
        "rank 1.0",
        "rank 1.1",
    ]


def fields(plan):
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def blocks_of(picture):
    root = ElementTree.fromstring(picture)
    return [one for one in root.iter(f"{SVG}g") if one.get("class") == "block"]


def test_memory_parts_add_up_to_what_the_plan_predicts():
    plan = made("pipedream", ranks=3, memory=300 * MIB).with_versions(versions.Stash())
    picture = picture_of(plan)
    assert [device.memory_bytes for device in picture.devices] == list(plan.rank_bytes)
    assert picture.devices[0].memory == (120 * MIB, 40 * MIB, 80 * MIB, 90 * MIB, 5 * MIB)
    assert picture.groups[0].headings[0].remarks[-1] == "3 weight versions"


def test_what_does_not_fit_is_seen_and_told():
    plan = made("pipedream", ranks=3, memory=300 * MIB)
    over = [device.over_bytes for device in picture_of(plan).devices]
    assert over == [35 * MIB, 0, 0]
    told = picture_of(plan)
    assert "does not fit: gpu0 (35 MiB over)" in told.facts
    drawn = plan_svg(told)
    assert drawn.count('class="small wrong"') == 1
    assert drawn.count('class="limit"') == 3 + 1  # and one in the legend
    assert "!" in plan_text(told)
    roomy = picture_of(made("pipedream", ranks=3, memory=500 * MIB))
    assert 'class="small wrong"' not in plan_svg(roomy)
    assert "!" not in plan_text(roomy)
    assert not any("fit" in fact for fact in roomy.facts)


def test_a_limit_far_beyond_is_in_words_only():
    drawn = plan_svg(picture_of(made(memory=1 << 40)))
    assert drawn.count('class="limit"') == 1
    assert "of 1\N{NO-BREAK SPACE}TiB" in drawn


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "seq1f1b"])
@pytest.mark.parametrize("width", [1040.0, 1600.0])
def test_blocks_are_as_long_as_their_times_and_nothing_leaves_the_picture(schedule, width):
    picture = picture_of(made(schedule, ranks=4, memory=200 * MIB))
    drawn = plan_svg(picture, width)
    root = ElementTree.fromstring(drawn)
    rects = [block.find(f"{SVG}rect") for block in blocks_of(drawn)]
    lengths = [length for rank in picture.ranks for b in rank.blocks for _, length in b.parts]
    assert len(rects) == len(lengths)
    rates = [
        (float(rect.get("width")) + 1) / length for rect, length in zip(rects, lengths, strict=True)
    ]
    assert max(rates) < 1.05 * min(rates)
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
    assert max(float(text.get("y")) for text in root.iter(f"{SVG}text")) < float(root.get("height"))


def test_a_plan_without_costs_is_drawn():
    bare = Plan(model="m", schedule="1f1b", num_microbatches=2,
                stages=tuple(StagePlan(layers=(f"<l{k}>",), rank=k) for k in range(2)))  # fmt: skip
    picture = picture_of(bare)
    assert "stage 1──" in plan_text(picture)
    drawn = plan_svg(picture)
    assert "no times are known" in drawn
    ElementTree.fromstring(drawn)
    assert "&lt;l0&gt;" in drawn


def test_long_names_keep_their_ends():
    names = [f"model.encoder.layers.{k}.attention.projection" for k in range(40)]
    shown = shortened_layers(names, 12, 330)
    assert shown.startswith("…") and shown.endswith("projection (40 layers)")
    assert shortened_layers(names[:1], 12, 900) == names[0]
    assert wrapped("one two three", 12, 60) == ["one two", "three"]
    assert wrapped("", 12, 60) == []


def test_the_chosen_row_is_known():
    assert picture_of(REPLICATED).choices.rows[0][0] == "this plan"
    chosen = Alternative(label="straight", description="", step_seconds=0.1, remark="chosen")
    told = picture_of(
        Plan(**{**fields(REPLICATED), "alternatives": (*REPLICATED.alternatives, chosen)})
    ).choices
    assert [row[0] for row in told.rows] == ["data parallel", "best asynchronous", "straight"]
    assert told.chosen == 2
    assert picture_of(made()).choices is None


@pytest.mark.parametrize("suffix", [".txt", ".svg", ".html", ".json"])
def test_a_file_has_the_plan_and_its_timeline(tmp_path, suffix):
    path, target = tmp_path / "plan.json", tmp_path / f"picture{suffix}"
    REPLICATED.save(path)
    run("draw", path, "-o", target)
    written = target.read_text()
    if suffix == ".json":
        assert len(json.loads(written)["traceEvents"]) > 24
        return
    expected = (
        "1f1b: 2 stages on 3 ranks, 8 microbatches of 16", "gpu2", "fc6", "0→1",
        "Convolutions on two devices", "best asynchronous", "1f1b, predicted",
    )  # fmt: skip
    for words in expected:
        assert words in written
    if suffix == ".svg":
        root = ElementTree.fromstring(written)
        assert [one.get("class") for one in root.iter(f"{SVG}svg")] == [
            "timeline", "timeline plan", "timeline",
        ]  # fmt: skip
        inner = list(root.iter(f"{SVG}svg"))[1:]
        assert float(inner[1].get("y")) == float(inner[0].get("height"))
        assert float(root.get("height")) == sum(float(one.get("height")) for one in inner)
    if suffix == ".html":
        assert "<td><b>124 ms</b></td>" in written
        # Every pattern that a block refers to is there.
        assert set(re.findall(r"url\(#([\w-]+)\)", written)) <= set(
            re.findall(r'<pattern id="([\w-]+)"', written)
        )
        assert "http" not in written.replace("http-equiv", "")


def test_the_picture_in_the_docs_is_that_of_its_file(tmp_path):
    # docs/plans.md shows this command.
    drawn = tmp_path / "plan.svg"
    run("draw", IMAGES / "plan.json", "-o", drawn)
    assert drawn.read_text() == (IMAGES / "plan.svg").read_text()


def test_versions_and_policies_are_drawn_too(tmp_path):
    path = tmp_path / "plan.json"
    made("pipedream", ranks=2).save(path)
    told = run("draw", path, "--policy", "latest")
    assert told.startswith("pipedream: 2 stages on 2 ranks, 8 microbatches, versions: latest")
    assert "weight versions" not in told
    assert "reads  │" in told
    plain = run("draw", path)
    assert "2 weight versions" in plain
    assert "in its steady state" in plain and "reads  │" in plain


def test_a_picture_of_no_kind_is_refused(tmp_path):
    plan = made()
    with pytest.raises(
        errors.InputError, match=r"end the name in \.txt, \.svg, \.pdf, \.png, \.html, \.json"
    ):
        draw_plan(picture_of(plan), plan.simulate(), tmp_path / "plan.bmp")
    with pytest.raises(errors.InputError, match="versions"):
        draw_plan(picture_of(plan), plan.simulate(), versions=True)
