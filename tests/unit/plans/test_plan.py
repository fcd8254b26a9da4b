"""A plan is a file that people edit: one wrong thing gives one message that says what, where and
what to do."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import nn

from penstock import errors
from penstock.core.cluster import Device
from penstock.core.schedule import families
from penstock.core.versions import Latest, Stash
from penstock.planning.plans import Alternative, Plan, StagePlan, draft
from tests.kit.command_line import refused, succeed
from tests.kit.helpers import make_plan
from tests.kit.paths import ROOT

GONE = object()


def stage(rank, *layers, **more):
    return StagePlan(
        layers=layers,
        rank=rank,
        forward_seconds=0.010,
        backward_input_seconds=0.011,
        backward_weight_seconds=0.009,
        transfer_bytes=1 << 20,
        parameter_bytes=1 << 22,
        **more,
    )


PLAN = Plan(
    model="0123456789abcdef",
    schedule="1f1b",
    options={"replicas": "2-1"},
    num_microbatches=4,
    stages=(
        stage(0, "embed", "block", tensor_ranks=2),
        stage(2, "head", tensor_ranks=2, splits={"head": "column"}),
    ),
    devices=tuple(Device(name=f"gpu{index}", memory_bytes=1 << 30) for index in range(6)),
    alternatives=(Alternative(label="one device", description="1 stage", step_seconds=0.3),),
)


def edited(*edits) -> str:
    """The saved plan with (path, value) put into it."""
    content = json.loads(PLAN.to_json())
    for path, value in edits:
        *way, last = path
        at = content
        for key in way:
            at = at[key]
        if value is GONE:
            del at[last]
        else:
            at[last] = value
    return json.dumps(content)


WRONG = {
    # What the file says.
    "an unknown key": ([(("shedule",), 1)], "unknown field `shedule`"),
    "an unknown key of a stage": (
        [(("stages", 1, "layer"), [])], "unknown field `layer` - at `$.stages[1]`",
    ),
    "an unknown key of a device": (
        [(("devices", 0, "memory"), 1)], "unknown field `memory` - at `$.devices[0]`",
    ),
    "an unknown key of a policy": (
        [(("versions",), {"policy": "flush", "t": 1})], "unknown field `t` - at `$.versions`",
    ),
    "a missing key": ([(("model",), GONE)], "missing required field `model`"),
    "another version": ([(("version",), 1)], "version 1; this Penstock reads version 2"),
    "a text for a number": ([(("num_threads",), "2")], "`int`, got `str` - at `$.num_threads`"),
    "a name for a list": ([(("stages", 0, "layers"), "embed")], "at `$.stages[0].layers`"),
    "a way to recompute that is none": (
        [(("stages", 0, "recompute"), "some")], "'some' - at `$.stages[0].recompute`",
    ),
    # Numbers.
    "no microbatch": ([(("num_microbatches",), 0)], "num_microbatches is 0, but must be ≥ 1"),
    "no thread": ([(("num_threads",), 0)], "num_threads is 0, but must be ≥ 1"),
    "threads that no host has": ([(("num_threads",), 10**9)], "num_threads is 1000000000"),
    "ranks that nobody has": ([(("stages", 0, "tensor_ranks"), 10**9)], "tensor_ranks is 1000000"),
    "no tensor rank": ([(("stages", 0, "tensor_ranks"), 0)], "tensor_ranks is 0, but must be ≥ 1"),
    "negative rows": ([(("microbatch_size",), -8)], "microbatch_size is -8, but must be ≥ 0"),
    "a negative time": (
        [(("stages", 1, "forward_seconds"), -1)], "forward_seconds is -1.0, but must be ≥ 0",
    ),
    "negative bytes": (
        [(("stages", 0, "transfer_bytes"), -1)], "transfer_bytes is -1, but must be ≥ 0",
    ),
    "negative memory": ([(("devices", 1, "memory_bytes"), -1)], "'gpu1': memory_bytes is -1"),
    "a device that stands still": ([(("devices", 1, "speed"), 0)], "speed is 0.0, but must be > 0"),
    # Layers.
    "no stage": ([(("stages",), [])], "has no stages; give it at least one"),
    "a stage without layers": ([(("stages", 1, "layers"), [])], "stage 1 has no layers; give"),
    "a layer twice": (
        [(("stages", 0, "layers"), ["embed", "head"])], "layers head stand in more than one place",
    ),
    # Schedule, options, placement.
    "an unknown schedule": ([(("schedule",), "1f2b")], "did you mean '1f1b'?"),
    "unlike replicas of another schedule": (
        [(("schedule",), "zb-h1")], "zb-h1: replicas are 2-1, but its pipelines stand side by side",
    ),
    "an option of another schedule": (
        [(("options", "waves"), 2)], "1f1b has no option waves; it takes replicas",
    ),
    "an option that is none": (
        [(("options", "replica"), "2-1")], "1f1b has no option replica; it takes replicas",
    ),
    "an option that follows": (
        [(("options", "num_microbatches"), 8)], "options: num_microbatches is none, it follows",
    ),
    "options that are no replicas": (
        [(("options", "replicas"), "2-0")], "replicas is '2-0'; give a count ≥ 1 for every stage",
    ),
    "more replicas than stages": (
        [(("options", "replicas"), "2-1-1")], "1f1b on 4 ranks has 3 stages, but the plan has 2",
    ),
    "replicas forgotten": (
        [(("options",), {})], "stage 1 is on rank 2, but 2 stages without replicas are on at most",
    ),
    "more replicas than microbatches": (
        [(("num_microbatches",), 1)],
        "has 2 replicas, but a minibatch has only 1 microbatch; each replica needs one",
    ),
    "a rank of another stage": (
        [(("stages", 1, "rank"), 1)], "stage 1 is on rank 1, but 1f1b runs it on rank 2",
    ),
    "a rank that is not the first": (
        [(("stages", 0, "rank"), 1)], "stage 0 is on rank 1, but 1f1b runs it on rank 0",
    ),
    "a rank that nobody has": (
        [(("stages", 1, "rank"), 7)], "stage 1 is on rank 7, but 1f1b runs it on rank 2",
    ),
    "a rank beyond all reason": (
        [(("stages", 1, "rank"), 300), (("options",), {})],
        "stage 1 is on rank 300, but 2 stages without replicas are on at most 2 ranks",
    ),
    "a negative rank": ([(("stages", 1, "rank"), -1)], "rank is -1, but must be ≥ 0"),
    # Devices and tensor ranks.
    "a device too few": (
        [(("devices", 5), GONE)], "6 devices are needed, but 5 are named; name one for each rank",
    ),
    "a device twice": (
        [(("devices", 0, "name"), "gpu3")], "device 'gpu3' is given to more than one rank; name",
    ),
    "splits without tensor ranks": (
        [(("stages", 1, "tensor_ranks"), 1), (("devices",), [])],
        "layer 'head' is split, but tensor_ranks of its stage is 1; take the splits out",
    ),
    "splits of another stage's layer": (
        [(("stages", 1, "splits"), {"embed": "row"})],
        "stage 1: splits has 'embed', which is no layer of this stage",
    ),
    "a split that is none": (
        [(("stages", 1, "splits"), {"head": "diagonal"})], "matching regex",
    ),
    # Weight versions.
    "an unknown policy": ([(("versions",), {"policy": "newest"})], "'newest' - at `$.versions.po"),
    "a policy of another schedule": (
        [(("versions",), {"policy": "stash"})],
        "policy stash is for the schedule pipedream, but the plan's is 1f1b; change one of them",
    ),
    "a policy that needs even replicas": (
        [(("schedule",), "pipedream"), (("versions",), {"policy": "vertical-sync"})],
        "vertical sync needs as many replicas of every stage",
    ),
    "a minibatch too short for two versions": (
        [(("schedule",), "pipedream-2bw"), (("num_microbatches",), 1)],
        "2bw with 2 stages needs minibatches of",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edits", "message"), WRONG.values(), ids=WRONG)
def test_one_wrong_thing_gets_one_message_that_names_the_file(edits, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(edited(*edits))
    with pytest.raises(errors.FileError) as caught:
        Plan.load(path)
    told = str(caught.value)
    assert told.startswith(f"{path} is not a valid Plan: ")
    assert message in told
    assert len(told.splitlines()) == 1
    # The command line reads it no other way.
    assert refused("draw", path) == told


RIGHT = [
    (("num_microbatches",), 32),
    (("devices",), []),
    (("devices",), GONE),
    (("options", "replicas"), [2, 1]),
    (("reason",), "because"),
    (("stages", 0, "recompute"), "stage"),
    (("stages", 0, "layers"), ["embed"]),
    (("stages", 1, "splits"), {"head": "row"}),
    (("schedule",), "pipedream"),
]


@pytest.mark.parametrize("edit", RIGHT, ids=lambda edit: ".".join(map(str, edit[0])))
def test_what_may_be_edited_is_read_and_drawn(edit, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(edited(edit))
    assert Plan.load(path) != PLAN
    succeed("draw", path)


def test_the_page_about_plans_names_every_key_and_its_script_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = Path("docs/plans.md").read_text()
    for name in (*Plan.__struct_encode_fields__, *StagePlan.__struct_encode_fields__):
        assert f"`{name}`" in page, name
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "stage 2: features.24 … classifier.6 (6 layers)" in capsys.readouterr().out


def test_a_plan_comes_back_as_it_was(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.from_json(edited()) == PLAN


def test_only_a_plan_that_lacks_its_order_is_searched_for_and_only_once(monkeypatch):
    """A plan's own check searched, so whoever read a file or changed a reason might wait for it."""
    asked, search = [], draft.search_order

    def counting(*task):
        asked.append(task[0])
        return search(*task)

    monkeypatch.setattr(draft, "search_order", counting)
    stages = (stage(0, "first"), stage(1, "second"))
    options = {"effort": 0}
    plan = Plan(model="", schedule="zb-auto", num_microbatches=3, stages=stages, options=options)
    assert asked == ["zb-auto"]
    assert Plan.from_json(plan.to_json()) == replace(plan, reason="") == plan
    assert asked == ["zb-auto"]
    with pytest.raises(errors.InputError, match="zb-auto needs one, and none is there"):
        replace(plan, order=())
    content = json.loads(plan.to_json())
    del content["order"]
    assert Plan.from_json(json.dumps(content)) == plan.edited(order=()) == plan
    assert asked == ["zb-auto"] * 3


def test_what_follows_from_the_policy_is_worked_out_by_whoever_makes_a_plan():
    plan = Plan(
        model="", schedule="pipedream", num_microbatches=4,
        stages=(stage(0, "first"), stage(1, "second")),
    )  # fmt: skip
    assert plan.versions == Stash()
    assert [own.weight_versions for own in plan.stages] == [2, 1]
    assert [own.weight_versions for own in plan.with_versions(Latest()).stages] == [1, 1]
    with pytest.raises(errors.InputError, match="stage 0: weight_versions is 2, but there are 1"):
        replace(plan, versions=Latest())
    with pytest.raises(errors.InputError, match="a plan has no field shedule"):
        plan.edited(shedule="1f1b")


FAMILIES = [name for name in families.names() if name not in families.SEARCHED]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_of_very_many_microbatches_is_read_from_few(monkeypatch, name):
    small = families.build(name, num_ranks=4, num_microbatches=8)
    rank_of = {op.stage: rank for op, rank in small.where.items()}
    stages = tuple(stage(rank_of[index], f"layer{index}") for index in sorted(rank_of))
    asked, build = [], families.build

    def counting(name, **options):
        asked.append(options["num_microbatches"])
        return build(name, **options)

    monkeypatch.setattr(families, "build", counting)
    plan = Plan(model="", schedule=name, num_microbatches=8, stages=stages)
    text = plan.to_json().replace('"num_microbatches": 8', '"num_microbatches": 100000')
    read = Plan.from_json(text)
    assert read.num_microbatches == 100_000
    assert read.stages == plan.stages
    assert max(asked) == 8
    if name != "chimera":  # where stage 0 has two ranks
        wrong = text.replace('"rank": 0', '"rank": 1', 1)
        with pytest.raises(errors.FileError, match="stage 0 is on rank 1, but"):
            Plan.from_json(wrong)
    huge = text.replace("100000", "10000001")
    with pytest.raises(
        errors.FileError, match="num_microbatches is 10000001, but may be 10,000,000 at most"
    ):
        Plan.from_json(huge)


def test_whatever_is_put_in_any_place_is_read_or_refused():
    content = json.loads(PLAN.to_json())
    num_refused = 0
    for way in ways(content):
        for value in (None, -1, 0, 10**30, 2.5, "x", "", [], {}, [[]], True):
            changed = copy.deepcopy(content)
            at = changed
            for key in way[:-1]:
                at = at[key]
            at[way[-1]] = value
            try:
                Plan.from_json(json.dumps(changed))
            except errors.FileError as error:
                num_refused += 1
                assert "\n" not in str(error)
    assert num_refused > 500


def ways(content, before=()):
    """The path of everything in a file."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from ways(value, (*before, key))


def test_a_wrong_file_ends_the_command_with_one_line_and_no_traceback(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(edited((("stages", 1, "rank"), 7)))
    code = "import sys; from penstock.cli import main; sys.argv[0] = 'penstock'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "draw", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"penstock: {path} is not a valid Plan: stage 1 is on rank 7")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("names", "fingerprint", "message"),
    [
        (("embed", "block", "tail"), PLAN.model, "not in the plan: tail; not in the model: head"),
        (("block", "embed", "head"), PLAN.model, "the order of the layers differs"),
        (("embed", "block", "head"), "f" * 16, "other parameter shapes or dtypes"),
    ],
)
def test_a_plan_of_another_model_is_refused(names, fingerprint, message):
    PLAN.check_model(("embed", "block", "head"), PLAN.model)
    with pytest.raises(errors.ModelError, match="profile and plan this one") as caught:
        PLAN.check_model(names, fingerprint)
    assert message in str(caught.value)


def test_a_ranks_memory_stands_once_in_the_table():
    plan = make_plan(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), 2, 4, schedule="zb-v")
    rows = [line.split() for line in plan.text(details=False).splitlines() if "1: " in line]
    assert [row[0] for row in rows] == ["0", "1", "1", "0"]
    assert [len(row) for row in rows] == [len(rows[0])] * 2 + [len(rows[0]) - 1] * 2
