"""What people's loops do beside steps: batches with the labels inside, held-out losses, schedulers
that wait for a metric. Always against a plain loop on one device, to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import penstock as pk
from penstock.base.errors import InputError
from penstock.engine.model.batches import plain
from penstock.engine.model.microbatches import split
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.one_device import OneDevice, assert_same, assert_same_values
from tests.kit.spilling import make_net, spilled_pipeline
from tests.kit.training import adamw, momentum, pipeline_of, sgd


class Opening(nn.Module):
    """A first layer that takes a dictionary, and says what it was given."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 16)
        self.given = []

    def forward(self, batch):
        self.given.append(dict(batch))
        hidden = self.words(batch["tokens"]) * batch["mask"].unsqueeze(-1)
        return hidden.sum(1) + batch.get("more", {}).get("features", 0.0)


def reader(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Opening(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def contents(rows=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 7, (rows, 5), generator=generator),
        "mask": torch.rand(rows, 5, generator=generator),
        "more": {"features": torch.randn(rows, 16, generator=generator), "nothing": None},
        "name": "a text",
        "labels": torch.randint(0, 4, (rows,), generator=generator),
    }


@dataclass
class Batch:
    tokens: Tensor
    mask: Tensor
    more: dict
    name: str
    labels: Tensor


class Named(NamedTuple):
    inputs: dict
    targets: Tensor


def without_labels(batch):
    return {key: value for key, value in batch.items() if key != "labels"}


FORMS = {
    "dictionary": dict,
    "mapping": UserDict,
    "mapping in a mapping": lambda batch: UserDict({**batch, "more": UserDict(batch["more"])}),
    "dataclass": lambda batch: Batch(**batch),
    "pair": lambda batch: (without_labels(batch), batch["labels"]),
    "pair of a mapping": lambda batch: [UserDict(without_labels(batch)), batch["labels"]],
    "named tuple": lambda batch: Named(without_labels(batch), batch["labels"]),
    "cut already": lambda batch: pk.Microbatches(split(batch, 4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_any_form_trains_as_inputs_and_targets_do(form):
    ours, theirs = reader(), reader()
    reference = OneDevice(theirs, 4, optimizer=momentum)
    made = FORMS[form]
    with pipeline_of(ours, optimizer=momentum) as pipeline:
        for seed in range(2):
            batch = contents(seed=seed)
            expected = reference.step(without_labels(batch), batch["labels"])
            assert torch.equal(pipeline.step(made(batch)), expected)
        batches = [contents(rows=rows, seed=rows) for rows in (7, 6)]
        losses = list(pipeline.steps(made(batch) for batch in batches))
        assert losses == [reference.step(without_labels(one), one["labels"]) for one in batches]
        if "pair" not in form and form != "named tuple":
            outputs = pipeline.evaluate(made(batches[0]))
            whole = torch.cat(outputs) if form == "cut already" else outputs
            torch.testing.assert_close(whole, theirs(without_labels(batches[0])))
    assert_same(ours, theirs)
    given = ours[0].given[0]
    assert set(given) == {"tokens", "mask", "more", "name"}
    assert given["name"] == "a text" and given["more"]["nothing"] is None
    assert len(given["tokens"]) == 2  # of seven rows in four microbatches


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(4, 5)}, "the batch has tokens, and no labels for the loss; name"),
        ({"x": torch.zeros(4, 5), "labels": None}, "labels of the batch is None, so the loss has"),
        (torch.zeros(4, 5), "the batch is a Tensor, which says nothing of inputs and targets"),
        ((torch.zeros(4), torch.zeros(4), torch.zeros(4)), "the batch is a tuple of 3"),
        ({"x": np.zeros(4), "labels": torch.zeros(4)}, "inputs hold an array of numpy"),
        ({"x": ["a", "b"], "labels": torch.zeros(2)}, r"inputs hold a list of texts, \['a', 'b'\]"),
        ({"x": torch.zeros(4), "y": torch.tensor(1), "labels": torch.zeros(4)}, "without dimens"),
        ({"x": torch.zeros(4, 16), "labels": torch.zeros(3)}, "have 4 rows, but targets have 3"),
    ],
)
def test_a_batch_that_says_too_little_is_refused(batch, message):
    with pipeline_of(make_mlp(), optimizer=sgd) as pipeline:
        with pytest.raises(InputError, match=message):
            pipeline.step(batch)
        expected = message.replace("the batch", "minibatch 0 of the loader")
        with pytest.raises(InputError, match=expected):
            list(pipeline.steps([batch]))


def test_targets_may_have_other_keys():
    ours, theirs = make_mlp(0.0), make_mlp(0.0)
    inputs, targets = make_batch(8)

    def loss(outputs, wanted):
        each = F.cross_entropy(outputs, wanted["first"]), F.cross_entropy(outputs, wanted["second"])
        return sum(each)

    class Taking(nn.Module):
        def forward(self, batch):
            return batch["x"]

    ours, theirs = nn.Sequential(Taking(), *ours), nn.Sequential(Taking(), *theirs)
    wanted = {"first": targets, "second": targets.flip(0)}
    reference = OneDevice(theirs, 4, loss, sgd)
    with pipeline_of(ours, loss=loss, optimizer=sgd, labels=["first", "second"]) as pipeline:
        assert pipeline.step({"x": inputs, **wanted}) == reference.step({"x": inputs}, wanted)
    assert_same(ours, theirs)
    for labels in (3, [], [1]):
        with pytest.raises(InputError, match=r"labels is .*; give the key of the targets"):
            pipeline_of(make_mlp(), labels=labels)
    with pytest.raises(InputError, match=r"labels is .*, which names a key twice"):
        pipeline_of(make_mlp(), labels=("first", "first"))


def test_plain_values_stay_the_objects_that_they_are():
    given = {"a": (torch.zeros(2), [torch.ones(2)])}
    assert plain(given, "inputs") is given


class OwnLoss(nn.Module):
    """The last layer of a model that computes its loss itself, where it gets labels."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, given):
        hidden, labels = given
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, batch):
        return self.layer(batch["x"]).relu(), batch["labels"]


def test_a_model_may_compute_its_loss_itself():
    torch.manual_seed(0)
    ours = nn.Sequential(Handing(), OwnLoss())
    theirs = copy.deepcopy(ours)
    inputs, labels = make_batch(8)
    batch = {"x": inputs, "labels": labels}
    reference = OneDevice(theirs, 4, lambda outputs, _: outputs["loss"], sgd)
    with pipeline_of(ours, loss=pk.model_loss, optimizer=sgd) as pipeline:
        assert pipeline.step(UserDict(batch)) == reference.step(batch, labels)
        assert_same(ours, theirs)
        held_out = pipeline.evaluate_loss([UserDict(batch)])
        torch.testing.assert_close(held_out, theirs(batch)["loss"].detach())
        assert pipeline.evaluate(batch)["logits"].shape == (8, 4)
    logits = pipeline_of(make_mlp(), loss=pk.model_loss)
    with logits as pipeline, pytest.raises(pk.errors.StageError, match=r"it has shape \(2, 4\)"):
        pipeline.step(inputs, labels)


@pytest.mark.parametrize("outputs", [{}, (), "text", (1.0,)])
def test_a_model_without_a_loss_is_told_how_to_have_one(outputs):
    with pytest.raises(InputError, match="finds no loss in what the model gave"):
        pk.model_loss(outputs)


def test_model_loss_takes_it_from_where_models_put_it():
    loss = torch.tensor(1.0)

    class Outputs:
        def __init__(self):
            self.loss = loss

    for outputs in (loss, {"loss": loss}, (loss, None), Outputs()):
        assert pk.model_loss(outputs) is loss


# ---------------------------------------------------------------- held-out losses


def mean_of_words(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=3)


def counted(targets):
    return (targets != 3).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_held_out_loss_is_that_of_all_rows(schedule, weighted):
    model = make_mlp(dropout=0.5)
    loader = [make_batch(rows, seed=rows) for rows in (13, 8, 3)]
    loss = mean_of_words if weighted else F.cross_entropy
    weight = counted if weighted else None
    with pipeline_of(model, schedule, loss=loss, weight=weight, optimizer=sgd) as pipeline:
        pipeline.step(*make_batch(8))
        before = copy.deepcopy(model.state_dict())
        held_out = pipeline.evaluate_loss(loader)
        single = pipeline.evaluate_loss(*loader[0])
        assert torch.equal(single, pipeline.evaluate_loss(loader[0]))
        assert model.training
        kinds = {span.op.kind for span in pipeline.timeline.spans}
        assert kinds & {pk.Kind.BACKWARD, pk.Kind.BACKWARD_INPUT}  # still that of the step
    model.eval()
    with torch.no_grad():
        inputs, targets = (torch.cat(column) for column in zip(*loader, strict=True))
        expected = loss(model(inputs), targets)
        first = loss(model(loader[0][0]), loader[0][1])
    torch.testing.assert_close(held_out, expected)
    torch.testing.assert_close(single, first)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_held_out_loss_may_be_a_sum_and_of_an_asynchronous_pipeline():
    def total(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    model = make_mlp(dropout=0.0)
    loader = [make_batch(8, seed=seed) for seed in (1, 2)]
    with pipeline_of(model, loss=total, reduction="sum", optimizer=sgd) as pipeline:
        summed = pipeline.evaluate_loss(loader)
    outputs = model(torch.cat([x for x, _ in loader]))
    torch.testing.assert_close(summed, total(outputs, torch.cat([y for _, y in loader])).detach())
    plan = replace(make_plan(model, 2, 4, "pipedream"), versions=pk.versions.Stash())
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=sgd, lr_scheduler=plateau
    ) as pipeline:
        assert len([*pipeline.steps(loader)]) == 2
        held_out = pipeline.evaluate_loss(loader)
        for _ in range(2):
            pipeline.schedulers.step(held_out)
        assert {*pipeline.optimizers.learning_rates} == {0.05}
    outputs = model(torch.cat([x for x, _ in loader]))
    expected = F.cross_entropy(outputs, torch.cat([y for _, y in loader])).detach()
    torch.testing.assert_close(held_out, expected)


def test_there_must_be_something_to_evaluate():
    with pipeline_of(make_mlp(), optimizer=sgd) as pipeline:
        with pytest.raises(InputError, match="there is no batch to evaluate"):
            pipeline.evaluate_loss([])
        with pytest.raises(InputError, match="what to evaluate is of type int"):
            pipeline.evaluate_loss(3)
        nan = torch.full((8, 16), float("nan"))
        assert pipeline.evaluate_loss(nan, make_batch(8)[1]).isnan()  # which changes no weight
    with pipeline_of(make_mlp(), optimizer=sgd, results="none") as pipeline:
        assert pipeline.evaluate_loss([make_batch(8)]) is None


# ---------------------------------------------------------------- optimizers and schedulers


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_scheduler_that_waits_for_a_metric_follows_one_device(schedule, outside, tmp_path):
    ours, theirs = make_mlp(0.0), make_mlp(0.0)
    reference = OneDevice(theirs, 4, optimizer=adamw)
    their_scheduler = plateau(reference.optimizer)
    options = {} if outside else {"lr_scheduler": plateau}
    with pipeline_of(ours, schedule, optimizer=adamw, **options) as pipeline:
        scheduler = plateau(pipeline.optimizers) if outside else pipeline.schedulers
        for seed in range(4):
            if seed == 2 and not outside:
                pipeline.save(tmp_path, background=False)
                scheduler.step(9.0)
                pipeline.load(tmp_path)
            batch = make_batch(13, seed=seed)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            held_out = pipeline.evaluate_loss(*make_batch(13, seed=9))
            scheduler.step(held_out)
            their_scheduler.step(float(held_out))
            rate = reference.optimizer.param_groups[0]["lr"]
            assert {*pipeline.optimizers.learning_rates} == {rate}
            if not outside:
                assert {*scheduler.get_last_lr()} == {rate}
        assert rate < 1e-2
    assert_same(ours, theirs)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_rates_that_are_set_hold_from_the_next_step_on(clip_norm):
    """With clipping, stages that come and go make the updates of a step when the next one comes."""
    options = {"clip_norm": clip_norm} if clip_norm else {}
    ours, theirs = make_net(), make_net()
    results = []
    for model, spilled in ((ours, True), (theirs, False)):
        how = {} if spilled else {"spill": None}
        with spilled_pipeline(model, options=options, **how) as pipeline:
            losses = []
            for seed in range(3):
                losses.append(pipeline.step(*make_batch(8, seed=seed)))
                for group in pipeline.optimizers.param_groups:
                    group["lr"] *= 0.3
            results.append((losses, pipeline.optimizers.learning_rates, pipeline.state_dict()))
    (losses, rates, state), (expected, their_rates, their_state) = results
    assert losses == expected
    assert rates == their_rates == pytest.approx([1e-2 * 0.3**3] * 5)
    assert all(torch.equal(state[key].cpu(), their_state[key]) for key in their_state)


def test_handles_have_every_stage_and_refuse_what_steps_do():
    with pipeline_of(make_mlp(), "zb-v", optimizer=sgd, lr_scheduler=plateau) as pipeline:
        optimizers, schedulers = pipeline.optimizers, pipeline.schedulers
        # Not all stages of six layers have parameters.
        assert set(optimizers.by_stage) == set(schedulers.by_stage) <= set(range(4))
        assert len(optimizers.param_groups) == len(optimizers.by_stage) == 3
        assert schedulers.wait_for_metric
        for refused in (
            optimizers.step,
            optimizers.zero_grad,
            optimizers.state_dict,
            lambda: optimizers.load_state_dict({}),
            lambda: optimizers.add_param_group({}),
        ):
            with pytest.raises(InputError, match=r"pipeline|groups are made"):
                refused()
        with pytest.raises(InputError, match="the metric is 'low'; give one number"):
            schedulers.step("low")
        for _ in pipeline.steps([make_batch(8)] * 2):
            assert optimizers.learning_rates == [0.1] * 3
            with pytest.raises(InputError, match="running already"):
                _ = optimizers.param_groups
            with pytest.raises(InputError, match="running already"):
                schedulers.step(1.0)
    without = pipeline_of(make_mlp(), optimizer=sgd)
    with without as pipeline, pytest.raises(InputError, match="no scheduler to step"):
        pipeline.schedulers.step(1.0)
    with pipeline_of(
        make_mlp(), optimizer=sgd, lr_scheduler=lambda one: torch.optim.lr_scheduler.StepLR(one, 2)
    ) as pipeline:
        assert not pipeline.schedulers.wait_for_metric
        with pytest.raises(InputError, match="stepped after every update by themselves"):
            pipeline.schedulers.step(1.0)


# ---------------------------------------------------------------- the loss that a step gives


def test_who_goes_backward_from_a_loss_is_told_that_it_is_done():
    with pipeline_of(make_mlp(), optimizer=sgd) as pipeline:
        given = [pipeline.step(*make_batch(8)), *pipeline.steps([make_batch(8)])]
    for loss in given:
        scaled = torch.amp.GradScaler("cpu").scale(loss)
        for one in (loss, loss / 4, loss * 0.5, 0.5 * loss, scaled):
            with pytest.raises(InputError, match=r"has gone backward already.* share=1/n"):
                one.backward()
        assert type(loss + 1) is type(torch.stack([loss, loss])) is type(loss.detach()) is Tensor
        stream = io.BytesIO()
        torch.save(loss, stream)
        stream.seek(0)
        copies = copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), torch.load(stream)
        assert all(type(one) is Tensor and torch.equal(one, loss) for one in copies)
        plainly = loss.detach()
        assert (f"{loss:.3f}", repr(loss), float(loss)) == (
            f"{plainly:.3f}", repr(plainly), plainly.item()
        )  # fmt: skip
        weight = torch.ones((), requires_grad=True)
        (loss * weight).backward()  # a gradient of its own
        assert weight.grad == loss


# ---------------------------------------------------------------- what transformers give


class Tagger(nn.Module):
    """As models of transformers: keywords, and a loss if it gets labels."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens, mask=None, labels=None):
        hidden = self.words(tokens)
        logits = self.head(hidden if mask is None else hidden * mask.unsqueeze(-1))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.xdist_group("captured models")
@pytest.mark.parametrize("inside", [True, False])
def test_a_captured_model_gets_the_labels_that_it_was_captured_with(inside):
    torch.manual_seed(0)
    theirs = Tagger()
    generator = torch.Generator().manual_seed(1)
    batch = {
        "labels": torch.randint(0, 4, (6, 5), generator=generator),
        "tokens": torch.randint(0, 7, (6, 5), generator=generator),
        "mask": torch.ones(6, 5),
    }
    sample = batch if inside else without_labels(batch)
    captured = pk.capture(copy.deepcopy(theirs), sample)
    assert captured.input_names == ("tokens", "mask", "labels")[: len(sample)]

    def loss(outputs, labels):
        assert ("loss" in outputs) is inside
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = theirs

        def forward(self, given):
            return self.model(**given)

    reference = OneDevice(Spread(), 2, loss, sgd)
    # An own function of the outputs, or that of the model: they are the same.
    losses = [loss, pk.model_loss] if inside else [loss]
    expected = reference.step(sample, batch["labels"])
    for own_loss in losses:
        model = copy.deepcopy(captured)
        with pipeline_of(model, num_microbatches=2, loss=own_loss, optimizer=sgd) as pipeline:
            assert pipeline.step(UserDict(batch)) == expected
            held_out = pipeline.evaluate_loss(batch)
            torch.testing.assert_close(held_out, loss(theirs(**sample), batch["labels"]).detach())
            assert "logits" in pipeline.evaluate(batch)
            assert_same_values(pipeline.state_dict(), theirs.state_dict())


@pytest.mark.soak
@pytest.mark.xdist_group("captured models")
def test_a_collators_batches_train_a_captured_model_with_its_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config)
    model = copy.deepcopy(theirs)

    def collated(seed, rows=4):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 11, (rows, 6), generator=generator)
        labels = tokens.clone()
        labels[0, 4:] = -100  # padding, so microbatches have different numbers of terms
        mask = (labels != -100).long()
        given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        return transformers.BatchEncoding(given)

    captured = pk.capture(model, {**collated(0)})
    assert captured.input_names == ("input_ids", "attention_mask", "labels")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with pk.Pipeline(
        captured,
        make_plan(captured, 2, 2),
        loss=pk.model_loss,
        weight=lambda labels: (labels[:, 1:] != -100).sum(),
        optimizer=sgd,
    ) as pipeline:
        losses = list(pipeline.steps(collated(seed) for seed in range(2)))
        for seed, loss in enumerate(losses):
            expected = theirs(**collated(seed)).loss
            torch.testing.assert_close(loss, expected.detach())
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        held_out = pipeline.evaluate_loss([collated(7), collated(8, rows=2)])
        whole = [collated(7), collated(8, rows=2)]
        with torch.no_grad():
            terms = [float((one["labels"][:, 1:] != -100).sum()) for one in whole]
            each = [float(theirs(**one).loss) for one in whole]
        mean = sum(a * b for a, b in zip(terms, each, strict=True)) / sum(terms)
        torch.testing.assert_close(held_out, torch.tensor(mean))
        outputs = pipeline.evaluate(collated(7))
        assert type(outputs).__name__ == "CausalLMOutputWithCrossAttentions"
    assert_same(model, theirs, 1e-5)
