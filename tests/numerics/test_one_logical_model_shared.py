"""What ties stages together: tied weights, skip connections, frozen parts. Against one device."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.demo import gpt
from penstock.engine.model.spine import run_spine
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import in_turns
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import OneDevice, assert_same, assert_same_gradients, same
from tests.kit.training import adamw, pipeline_of, sgd

TOLERANCE = 1e-12
"""Where sums have another order, in float64."""

PLACEMENTS = [("1f1b", 2), ("1f1b", 4), ("zb-h1", 3), ("interleaved-1f1b", 2), ("zb-v", 2),
              ("zb-v", 4), ("hanayo", 2), ("chimera", 2), ("chimera", 4)]  # fmt: skip
"""Where both ends of the model are on different ranks, on one, or on several."""


class TiedGPT(nn.Module):
    """A GPT whose head predicts with the matrix of the embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        whole = gpt.GPT(vocabulary=11, width=8, heads=2, layers=6, context=5, dropout=dropout)
        self.embedding, self.blocks, self.head = whole.embedding, whole.blocks, whole.head
        self.head.logits.weight = self.embedding.tokens.weight
        self.double()

    def spine(self):
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens):
        return run_spine(self.spine(), tokens)


def token_batch(rows=9, seed=0, length=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("place", "options"),
    in_turns(
        itertools.product(
            PLACEMENTS, [{}, {"clip_norm": 0.3}, {"clip_norm": 0.3, "post_validate": True}]
        ),
        4,
    ),
)
def test_tied_weights_stay_one_weight(place, options):
    schedule, num_ranks = place
    # torch's pipelining lets them drift apart without a word.
    ours = TiedGPT()
    theirs = copy.deepcopy(ours)
    clip_norm = options.get("clip_norm")
    reference = OneDevice(theirs, 4, gpt.loss, adamw, clip_norm=clip_norm)
    with pipeline_of(ours, schedule, num_ranks, loss=gpt.loss, optimizer=adamw, **options) as p:
        for step in range(5):
            batch = token_batch(3 if step == 2 else 9, seed=step)
            assert same(p.step(*batch), reference.step(*batch), TOLERANCE)
            if clip_norm:
                assert same(p.grad_norm, reference.norm, TOLERANCE)
            if step == 1:  # a checkpoint comes back
                for model in (ours, theirs):
                    state = {k: v * 0.5 for k, v in model.state_dict().items()}
                    model.load_state_dict(state)
        batches = [token_batch(seed=step) for step in range(2)]
        for loss, batch in zip(p.steps(batches), batches, strict=True):
            assert same(loss, reference.step(*batch), TOLERANCE)
        tokens = token_batch()[0]
        torch.testing.assert_close(p.evaluate(tokens), theirs(tokens).detach(), rtol=1e-10, atol=0)
        state = p.state_dict()
        assert torch.equal(state["embedding.tokens.weight"], state["head.logits.weight"])
    assert_same(ours, theirs, 1e-11)
    assert ours.head.logits.weight is ours.embedding.tokens.weight


CHANGES = {
    "load_state_dict": lambda model, half: model.load_state_dict(half),
    "in place": lambda model, half: [
        parameter.data.copy_(half[name]) for name, parameter in model.named_parameters()
    ],
    "data": lambda model, half: [
        setattr(parameter, "data", half[name].clone())
        for name, parameter in model.named_parameters()
    ],
}


@pytest.mark.parametrize(
    ("how", "schedule", "then"),
    in_turns(
        itertools.product(CHANGES, ["1f1b", "zb-v", "chimera"], ["step", "steps", "evaluate"]), 4
    ),
)
def test_weights_that_change_between_steps_change_in_every_copy(how, schedule, then):
    model = TiedGPT()
    half = {key: value * 0.5 for key, value in model.state_dict().items()}
    expected = TiedGPT()
    expected.load_state_dict(half)
    batch = token_batch()
    with pipeline_of(model, schedule, loss=gpt.loss) as pipeline:
        pipeline.evaluate(batch[0])
        CHANGES[how](model, half)
        if then == "evaluate":
            found, wanted = pipeline.evaluate(batch[0]), expected(batch[0])
        elif then == "step":
            found, wanted = pipeline.step(*batch), gpt.loss(expected(batch[0]), batch[1])
        else:
            (found,) = pipeline.steps([batch])
            wanted = gpt.loss(expected(batch[0]), batch[1])
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("schedule", "num_ranks"), PLACEMENTS)
def test_gradients_of_tied_weights_add_up_without_an_optimizer(schedule, num_ranks):
    ours = TiedGPT()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, gpt.loss)
    with pipeline_of(ours, schedule, num_ranks, loss=gpt.loss) as pipeline:
        for step in range(3):
            how = {"update": step != 1, "share": 0.5}
            batch = token_batch(seed=step)
            pipeline.step(*batch, **how)
            reference.step(*batch, **how)
    assert_same_gradients(ours, theirs, TOLERANCE)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "zb-h1", "chimera"])
def test_tied_weights_accumulate_over_calls(schedule):
    ours = TiedGPT()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, gpt.loss, adamw)
    with pipeline_of(ours, schedule, loss=gpt.loss, optimizer=adamw) as pipeline:
        for step in range(6):
            how = {"update": step % 3 == 2, "share": 1 / 3}
            batch = token_batch(seed=step)
            assert same(pipeline.step(*batch, **how), reference.step(*batch, **how), TOLERANCE)
    assert_same(ours, theirs, 1e-11)


class Repeated(nn.Module):
    """One module that stands in the spine three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(16, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.double()

    def spine(self):
        return [self.first, self.again, nn.Tanh(), self.again, nn.Tanh(), self.again, self.last]

    def forward(self, value):
        return run_spine(self.spine(), value)


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", 4), ("zb-v", 2), ("zb-h2", 3), ("chimera", 2)]
)
def test_a_module_may_run_in_several_stages(schedule, num_ranks):
    ours = Repeated()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, optimizer=adamw, clip_norm=0.2)
    with pipeline_of(ours, schedule, num_ranks, optimizer=adamw, clip_norm=0.2) as pipeline:
        for step in range(4):
            batch = make_batch(9, torch.float64, seed=step)
            assert same(pipeline.step(*batch), reference.step(*batch), TOLERANCE)
    assert_same(ours, theirs, 1e-11)


class Down(nn.Module):
    """Halves the picture and leaves the full one for later; with it a number and nothing."""

    def __init__(self, channels, key):
        super().__init__()
        self.convolution = nn.Conv2d(channels, 2 * channels, 3, 2, 1)
        self.stashes = (key,)

    def forward(self, value):
        return torch.tanh(self.convolution(value)), {self.stashes[0]: {"wide": (value, 2, None)}}


class Up(nn.Module):
    """Doubles the picture and joins what was left."""

    def __init__(self, channels, key):
        super().__init__()
        self.transposed = nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1)
        self.recalls = (key,)

    def forward(self, value, **skips):
        wide, factor, nothing = skips[self.recalls[0]]["wide"]
        assert nothing is None
        return torch.tanh(self.transposed(value)) + factor * wide


class UNet(nn.Module):
    """Four levels; the first skip is of the input itself."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(1, 2, 1),
                *(Down(2 ** (level + 1), f"level_{level}") for level in range(3)),
                nn.Dropout(dropout),
                nn.Conv2d(16, 16, 1),
                *(Up(2 ** (level + 1), f"level_{level}") for level in reversed(range(3))),
                nn.Conv2d(2, 1, 1),
            ]
        )
        self.double()

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        return run_spine(self.layers, value)


def picture_batch(rows=9, seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 1, size, size)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


SKIP_PLACEMENTS = [("gpipe", 4), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 4), ("interleaved-1f1b", 2),
                   ("interleaved-1f1b", 4), ("interleaved-zb", 4), ("zb-v", 2), ("zb-v", 4),
                   ("dualpipe-v", 2), ("breadth-first", 2), ("hanayo", 4)]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "recompute"),
    in_turns(itertools.product(SKIP_PLACEMENTS, ["none", "stage", "layers"]), 4),
)
def test_skips_cross_any_number_of_stages(place, recompute):
    schedule, num_ranks = place
    ours, theirs = UNet(dropout=0.3), UNet(dropout=0.3)
    reference = SingleDevice(theirs, 4, F.mse_loss, adamw, seed=3)
    with pipeline_of(
        ours, schedule, num_ranks, recompute=recompute, loss=F.mse_loss, optimizer=adamw
    ) as pipeline:
        for step, (rows, size) in enumerate([(9, 8), (3, 8), (8, 16)]):
            batch = picture_batch(rows, step, size)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        inputs = picture_batch(7)[0]
        torch.testing.assert_close(
            pipeline.evaluate(inputs), theirs.eval()(inputs).detach(), rtol=1e-12, atol=1e-12
        )
    assert_same(ours, theirs)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_skips_cross_the_stages_of_chimera(num_ranks):
    ours, theirs = UNet(), UNet()
    reference = OneDevice(theirs, 4, F.mse_loss, adamw)
    with pipeline_of(ours, "chimera", num_ranks, loss=F.mse_loss, optimizer=adamw) as pipeline:
        for step, rows in enumerate([9, 3, 8]):
            batch = picture_batch(rows, step)
            assert same(pipeline.step(*batch), reference.step(*batch), TOLERANCE)
        assert pipeline.evaluate(picture_batch(7)[0]).shape == (7, 1, 8, 8)
    assert_same(ours, theirs, 1e-11)


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it, as LoRA has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, value):
        return self.base(value) + self.up(self.down(value))


def lora():
    torch.manual_seed(0)
    layers = [Adapted(16, 8)]
    for _ in range(4):
        layers += [nn.Tanh(), Adapted(8, 8)]
    return nn.Sequential(*layers, Adapted(8, 4))


FROZEN = {
    "first": slice(0, 2),
    "middle": slice(3, 4),
    "last": slice(5, 6),
    "first and last": slice(0, 6, 5),
    "all but the first": slice(1, 6),
}


def frozen_mlp(which):
    model = make_mlp(dropout=0.0)
    for layer in model[FROZEN[which]]:
        layer.requires_grad_(False)
    return model


MODELS = {"adapters": lora, **{which: (lambda which=which: frozen_mlp(which)) for which in FROZEN}}


PLACES = [("1f1b", 2), ("1f1b", 3), ("zb-h1", 3), ("zb-v", 2), ("interleaved-1f1b", 2)]


@pytest.mark.parametrize(
    ("which", "place", "recompute"),
    in_turns(itertools.product(MODELS, PLACES, ["none", "stage", "layers"]), 5),
)
def test_frozen_parts_stay_and_the_others_train(which, place, recompute):
    schedule, num_ranks = place
    ours, theirs = MODELS[which](), MODELS[which]()
    before = {n: p.detach().clone() for n, p in ours.named_parameters() if not p.requires_grad}
    reference = OneDevice(theirs, 4, optimizer=adamw, clip_norm=0.1)
    with pipeline_of(
        ours, schedule, num_ranks, recompute=recompute, optimizer=adamw, clip_norm=0.1
    ) as pipeline:
        for step in range(3):
            batch = make_batch(13, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
            assert torch.equal(pipeline.grad_norm, reference.norm)
    assert_same(ours, theirs)
    assert all(torch.equal(before[name], ours.get_parameter(name)) for name in before)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "chimera"])
def test_parts_may_be_frozen_and_thawed_between_steps(schedule):
    ours = TiedGPT()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, gpt.loss, sgd)
    with pipeline_of(ours, schedule, loss=gpt.loss, optimizer=sgd) as pipeline:
        for step in range(6):
            for model in (ours, theirs):
                model.embedding.requires_grad_(step % 2 == 0)
                model.blocks[3].requires_grad_(step > 2)
            batch = token_batch(seed=step)
            assert same(pipeline.step(*batch), reference.step(*batch), TOLERANCE)
    assert_same(ours, theirs, 1e-11)
