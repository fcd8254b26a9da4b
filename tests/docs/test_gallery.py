"""``docs/schedules`` and ``docs/versions`` are what ``make gallery`` writes, so that they cannot go
stale; what ``docs/versions`` and ``docs/asynchronous.md`` show is run, and what they say of
versions, delays and refusals is tried."""

import functools
import importlib
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock import schedules, versions
from penstock.base.errors import PenstockError
from penstock.cli.sources import read_policy
from penstock.core.schedule.about import about
from penstock.core.versions import POLICIES, USUAL
from tests.kit.paths import DOCS, ROOT
from tests.kit.streams import plan_for

FOLDERS = ("schedules", "versions")


# What they share takes long to make: one worker makes it.
pytestmark = pytest.mark.xdist_group("gallery")


@pytest.fixture(scope="session")
def modules():
    """What writes the pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools" / "gallery"))
        yield {name: importlib.import_module(name) for name in ("make", "policies")}


@pytest.fixture(scope="session")
def written(tmp_path_factory, modules):
    target = tmp_path_factory.mktemp("docs")
    modules["make"].main(target)
    return target


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_gallery_is_up_to_date(written, folder):
    """If it is not: ``make gallery``, and look at what has changed."""
    kept = {path.name: path.read_text() for path in (DOCS / folder).iterdir()}
    new = {path.name: path.read_text() for path in (written / folder).iterdir()}
    assert sorted(kept) == sorted(new)
    assert [name for name in new if new[name] != kept[name]] == []


def test_every_family_has_its_page_and_is_in_the_index(written, modules):
    folder = written / "schedules"
    index = (folder / "index.md").read_text()
    for name in schedules.names():
        page, said = (folder / f"{name}.md").read_text(), about(name)
        assert f"({name}.svg)" in page and (folder / f"{name}.svg").exists()
        assert f"]({name}.svg)]({name}.md)" in index
        for text in (said.summary, said.law, said.wins[1:], said.loses[1:]):
            assert text in page
        for option in said.options:
            assert f"\n- `{option.name}`" in page
        for number in said.arxiv:
            assert f"](https://arxiv.org/abs/{number})" in page
        assert "| bubble, % | stage bubble, % |" in page and f"`penstock draw {name} -p" in page
        # The bubble of a stream's ends is not to be ranked with that of a flush.
        link = f"[{name}]({name}.md)"
        row = re.search(rf"^\| (?:\*\*)?{re.escape(link)}.*$", index, re.M)[0]
        assert ("|  |  |  |" in row) == (name in (*USUAL, "optimal"))
        assert (", the default |" in row) == (name == modules["make"].DEFAULT)
        assert ("a long stream has no bubble" in page) == (name in USUAL)
    assert "## Two bubbles\n" in index and "(choosing.svg)" in index and "(bubbles.svg)" in index


def test_a_law_that_is_about_other_costs_says_so(written, modules):
    for name, costs in modules["make"].MADE_FOR.items():
        page = (written / "schedules" / f"{name}.md").read_text()
        assert f"With {costs}, p = 8 and m = 32, the bubble is 8.6 %, and 1F1B's 17.9 %." in page


def test_cards_are_short(written):
    """Whoever opens one wants to know when to take it."""
    for folder, at_most in (("schedules", 450), ("versions", 500)):
        for page in (written / folder).glob("*.md"):
            words = [one for one in page.read_text().split() if one.strip("|:-")]
            assert len(words) <= (at_most if page.stem != "index" else 800), page


def test_every_policy_says_everything_and_has_its_page(written, modules):
    folder = written / "versions"
    index = (folder / "index.md").read_text()
    for name in POLICIES:
        said = modules["policies"].about_policy(name)
        assert said.wins and said.loses and said.arxiv and said.papers and said.title != name
        page = (folder / f"{name}.md").read_text()
        for text in (said.summary, said.law, said.wins[1:], said.loses[1:]):
            assert text in page
        for option in said.options:
            assert option.meaning and f"- `{option.name}`, by default" in page
        assert f"({name}.svg)" in page and "| forward reads |" in page
        assert f"[{name}]({name}.md)" in index and f"]({name}.svg)]({name}.md)" in index
        picture = (folder / f"{name}.svg").read_text()
        assert picture.startswith("<svg") and 'class="v1"' in picture


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("name", POLICIES)
def test_what_the_pages_count_is_what_the_formulas_say(modules, name, num_stages):
    ways = modules["policies"].VARIANTS.get(name, {})
    for policy in (POLICIES[name](), *ways.values()):
        plan = plan_for(policy, num_stages, microbatches=num_stages, model=_model(num_stages))
        places = [plan.place(stage) for stage in range(num_stages)]
        found = modules["policies"].delays(policy, num_stages)
        assert found == tuple(map(policy.delay, places))
        copies = [versions.weight_copies(policy, place) for place in places]
        assert modules["policies"].copies(policy, num_stages) == tuple(copies)


def test_each_policy_is_asked_for_as_its_page_shows(written, modules):
    for name, (expression, words) in modules["policies"].ASKED.items():
        page = (written / "versions" / f"{name}.md").read_text()
        assert f"versions = pk.versions.{expression}\n" in page and f"--versions {words}`" in page
        assert read_policy(words) == eval(f"pk.versions.{expression}", {"pk": pk})
        namespace = {**_training(), "pk": pk}
        exec(_blocks(page)[0], namespace)
        plan, loader = namespace["plan"], namespace["loader"]
        assert plan.versions.name == name
        how = {"loss": namespace["loss"], "optimizer": namespace["optimizer"]}
        with pk.Pipeline(namespace["model"], plan, **how) as pipeline:
            assert len(list(pipeline.steps(loader))) == len(loader)


def test_the_script_of_asynchronous_training_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {**_training(), "pk": pk, "torch": torch, "F": F, "itertools": itertools}
    for block in _blocks((DOCS / "asynchronous.md").read_text()):
        exec(block, namespace)
    assert namespace["plan"].schedule == "pipedream-2bw"
    assert namespace["replicated"].replicas == (2, 1)
    assert (tmp_path / "weights.pt").exists()
    for picture in ("measured", "predicted"):
        assert 'class="v1"' in (tmp_path / f"{picture}.svg").read_text()
    said = capsys.readouterr().out
    assert "{0: 1, 1: 1, 2: 1, 3: 1}\n[2, 2, 2, 2]" in said
    assert "0 4 1.0" in said


STASH = versions.Stash()


class OwnParameter(nn.Parameter):
    """A class of its own."""


def _tied(model):
    model[-1].weight = model[1].weight


def _hooked(model):
    model[0].weight.register_hook(lambda gradient: gradient)


def _of_its_own(model):
    model[0].weight = OwnParameter(model[0].weight)


def _tracking(model):
    model[0] = nn.BatchNorm1d(6)


def _referring(model):
    weight = model[0].weight
    model[0].forward = lambda value: F.linear(value, weight)


def _writing(model):
    layer = model[0]

    def forward(value):
        with torch.no_grad():
            layer.weight.clamp_(-1, 1)
        return F.linear(value, layer.weight)

    layer.forward = forward


PREDICT, TWICE = versions.Predict(), versions.DoubleBuffer()
REFUSED = {
    "`clip_norm=`": {"clip_norm needs the gradients of all": [{"clip_norm": 1.0}]},
    "`grad_scaler=`": {
        "a grad_scaler needs the gradients of all": [{"grad_scaler": torch.amp.GradScaler("cpu")}]
    },
    "`post_validate=True`": {"for updates that depend on all": [{"post_validate": True}]},
    '`batch_norm="minibatch"`': {"needs a flush": [{"batch_norm": "minibatch"}]},
    "`step(…, update=False)`": {"updates as it goes": [{"update": False}]},
    "no `optimizer=`": {"give optimizer": [{"optimizer": None}]},
    "weights tied between stages": {"tied between stages 0, 1": [{"change": _tied}]},
    "layers that compute with a parameter through a reference of their own (a list, a closure)": {
        "through a reference of its own": [{"change": _referring}]
    },
    "writing into weights in a forward (clamping, `max_norm` of an embedding)": {
        "has written into": [{"change": _writing}]
    },
    "hooks on parameters, parameters of another class": {
        "has hooks": [{"change": _hooked}],
        "is a OwnParameter": [{"change": _of_its_own}],
    },
    "batch norm's running statistics, and other buffers that a forward writes, in a stage with "
    "replicas": {"statistics of its own": [{"change": _tracking, "replicas": "2-1"}]},
    "`torch.autocast` with `Latest`, `PipeMare`, `Predict`": {
        "autocast makes copies": [
            {"autocast": True, "policy": policy()}
            for policy in (versions.Latest, versions.PipeMare, versions.Predict)
        ]
    },
    "`Predict` with other optimizers than SGD, Adam, AdamW": {
        "prediction knows": [
            {"policy": PREDICT, "optimizer": optimizer}
            for optimizer in (torch.optim.RMSprop, pk.optimizers.nadamw, pk.optimizers.RotatedAdam)
        ]
    },
    "`DoubleBuffer` with fewer than p−1 microbatches": {
        "needs minibatches of 3": [{"policy": TWICE, "stages": 4, "microbatches": 2}]
    },
    "`VerticalSync` with unequal replicas": {
        "as many replicas": [{"policy": versions.VerticalSync(), "replicas": "2-1"}]
    },
    "a policy on another schedule than its own": {"the plan's is 1f1b": [{"schedule": "1f1b"}]},
}
"""By row of the table: what the error says, and how one gets it."""


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_said_to_be_refused_is(row):
    assert f"\n| {row} | " in (DOCS / "asynchronous.md").read_text()
    for message, ways in REFUSED[row].items():
        for how in ways:
            with pytest.raises(PenstockError, match=message):
                _train(**how)


def test_what_is_not_said_to_be_refused_trains():
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "asynchronous.md").read_text(), re.M)
    assert {*REFUSED} == {*rows[rows.index("`clip_norm=`") :]}
    for policy in POLICIES.values():
        autocast = policy.stashes or policy.activations == "newest"
        _train(policy=policy(), autocast=autocast, clip_stage_norm=1.0)
        _train(policy=policy(), change=_tracking)
    _train(policy=versions.VerticalSync(), replicas="2-2")


def test_recomputing_reads_what_the_pages_say(modules):
    """Where a policy stashes, it changes nothing; otherwise, what is trained."""
    for name, policy in POLICIES.items():
        said = dict(modules["policies"].defined(policy()))
        if policy.activations == "newest":
            assert '`recomputing("stage")` is refused' in said["Recomputation"]
            with pytest.raises(PenstockError, match="goes back right behind a forward"):
                _train(policy=policy(), recompute="stage")
            plain, again = _train(policy=policy()), _train(policy=policy(), recompute="layers")
            assert all(map(torch.equal, plain.parameters(), again.parameters()))
            continue
        if policy.asynchronous:
            assert said["Recomputation"].startswith("Changes nothing") == policy.stashes
        plain, again = _train(policy=policy()), _train(policy=policy(), recompute="stage")
        same = all(map(torch.equal, plain.parameters(), again.parameters()))
        assert same == policy.stashes, name


def test_links_lead_somewhere():
    pages = [page for folder in FOLDERS for page in (DOCS / folder).glob("*.md")]
    for page in (*pages, DOCS / "asynchronous.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]+)(#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.M)
                names = [re.sub(r"[^\w -]", "", one.lower()) for one in headings]
                assert anchor[1:] in [one.replace(" ", "-") for one in names]


def _blocks(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def _model(num_layers=8):
    torch.manual_seed(2)
    layers = (
        nn.Linear(6, 6) if at % 2 else nn.Linear(6, 6, bias=False) for at in range(num_layers)
    )
    return nn.Sequential(*layers)


@functools.cache
def _profiled():
    """What every ``_model`` is: its times are not what the pages are about."""
    return pk.profile(_model(), torch.randn(2, 6), repeats=1, ranks=0)


def _training():
    """What the scripts of the pages are given."""
    graph = _profiled()
    model = _model()
    batch = (torch.randn(16, 6), torch.randint(0, 6, (16,)))
    return {
        "model": model,
        "graph": graph,
        "cluster": pk.Cluster.local(4),
        "inputs": batch[0],
        "loader": [batch] * 8,
        "held_out": batch[0],
        "wanted": batch[1],
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    }


def _train(  # noqa: PLR0917
    policy=STASH,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    change=None,
    stages=2,
    microbatches=4,
    replicas=None,
    schedule=None,
    recompute="none",
    autocast=False,
    update=True,
    **how,
):
    model = _model()
    if change is not None:
        change(model)
    plan = plan_for(
        policy, stages, microbatches=microbatches, replicas=replicas, model=model, schedule=schedule
    ).recomputing(recompute)
    torch.manual_seed(1)
    batch = (torch.randn(16, 6), torch.randint(0, 6, (16,)))
    how = {"loss": F.cross_entropy, "optimizer": optimizer, "deadline_seconds": 300, **how}
    with pk.Pipeline(model, plan, **how) as pipeline:
        if not update:
            pipeline.step(*batch, update=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            list(pipeline.steps([batch] * 5))
    return model
