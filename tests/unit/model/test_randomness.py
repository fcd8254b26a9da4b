"""Every random operation of a layer draws from its stream, and nothing else notices."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as pk
from penstock.base.errors import StageError
from penstock.demo import GPT
from penstock.engine.model import randomness
from penstock.engine.model.randomness import LayerStreams, RandomStream, stream_seed
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_plan

ROWS = torch.linspace(-2, 2, 128).reshape(8, 16)
IMAGES = torch.ones(4, 8, 6, 6)
HEADS = torch.linspace(-1, 1, 2 * 2 * 8 * 16).reshape(2, 2, 8, 16)
WORDS = torch.linspace(-1, 1, 2 * 5 * 16).reshape(2, 5, 16)
HALF = torch.full((64,), 0.5)

torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
RECURRENT = nn.LSTM(16, 4, num_layers=2, dropout=0.5)


def distribution(name, *parameters):
    return getattr(torch.distributions, name)(*parameters)


DRAWS = {
    "dropout": lambda: F.dropout(ROWS, 0.5),
    "dropout in place": lambda: F.dropout(ROWS.clone(), 0.5, inplace=True),
    "Dropout2d": lambda: nn.Dropout2d()(IMAGES),
    "Dropout3d": lambda: nn.Dropout3d()(IMAGES[..., None]),
    "AlphaDropout": lambda: nn.AlphaDropout()(ROWS),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout()(IMAGES),
    "rand": lambda: torch.rand(8),
    "rand out": lambda: torch.rand(8, out=torch.empty(8)),
    "randn": lambda: torch.randn(8, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 1000, (8,)),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn_like": lambda: torch.randn_like(ROWS),
    "randint_like": lambda: torch.randint_like(ROWS, 1000),
    "randperm": lambda: torch.randperm(50),
    "normal of tensors": lambda: torch.normal(ROWS, ROWS.abs()),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (8,)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 10),
    "bernoulli": lambda: torch.bernoulli(HALF),
    "bernoulli_": lambda: torch.empty(64).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "normal_": lambda: torch.empty(8).normal_(),
    "cauchy_": lambda: torch.empty(8).cauchy_(),
    "log_normal_": lambda: torch.empty(8).log_normal_(),
    "geometric_": lambda: torch.empty(8).geometric_(0.01),
    "random_": lambda: torch.empty(8).random_(),
    "poisson": lambda: torch.poisson(100 * HALF),
    "binomial": lambda: torch.binomial(100 * HALF, HALF),
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.5),
    "gumbel_softmax": lambda: F.gumbel_softmax(ROWS),
    "rrelu": lambda: F.rrelu(ROWS, training=True),
    "RReLU in place": lambda: nn.RReLU(inplace=True)(ROWS.clone()),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, output_ratio=0.7)(
        torch.arange(2 * 3 * 9 * 9.0).reshape(2, 3, 9, 9)
    ),
    "Gamma": lambda: distribution("Gamma", HALF, HALF).sample(),
    "Dirichlet": lambda: distribution("Dirichlet", HALF).sample(),
    "Categorical": lambda: distribution("Categorical", torch.ones(1000)).sample((9,)),
    "MultiheadAttention": lambda: ATTENTION(WORDS, WORDS, WORDS)[0],
    "TransformerEncoderLayer": lambda: ENCODER(WORDS),
    "LSTM": lambda: RECURRENT(WORDS)[0],
    "initialisation": lambda: nn.Linear(4, 4).weight,
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(16)),
    "vmap": lambda: torch.vmap(lambda row: torch.rand(3) * row, randomness="different")(
        torch.ones(5, 3)
    ),
    "checkpoint": lambda: checkpoint(F.dropout, ROWS, use_reentrant=False),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_comes_from_the_stream_and_leaves_the_default_generator_alone(name, grad):
    results = []
    for seed in (5, 5, 6):
        torch.rand(3)  # the default generator's position must not matter
        before = torch.get_rng_state()
        with torch.set_grad_enabled(grad), RandomStream(seed) as stream:
            results.append(DRAWS[name]().detach().clone())
        assert stream.drew
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_stream_goes_on_where_it_was():
    with RandomStream(5):
        first, second = torch.rand(8), torch.rand(8)
    assert not torch.equal(first, second)
    with RandomStream(5):
        assert torch.equal(torch.cat([torch.rand(8), torch.rand(8)]), torch.cat([first, second]))


def test_draws_with_and_without_a_generator_argument_share_the_stream():
    with RandomStream(5):
        lent, given = torch.rand(8), torch.empty(8).uniform_()
    with RandomStream(5):
        again = torch.empty(8).uniform_()
    assert torch.equal(lent, again)
    assert not torch.equal(lent, given)


def test_the_users_own_generator_is_respected():
    generator = torch.Generator().manual_seed(9)
    with RandomStream(5) as stream:
        drawn = torch.rand(8, generator=generator)
        kept = torch.empty(8).uniform_(generator=generator)
    assert not stream.drew
    generator.manual_seed(9)
    assert torch.equal(drawn, torch.rand(8, generator=generator))
    assert torch.equal(kept, torch.empty(8).uniform_(generator=generator))


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (lambda: GPT(width=32, heads=2, layers=2, context=8), torch.arange(16).reshape(2, 8)),
        (lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True)), IMAGES),
        (lambda: nn.LSTM(16, 8, num_layers=2), WORDS),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), WORDS),
        (lambda: nn.Dropout(0.5).eval(), ROWS),
        (lambda: nn.Dropout(0.0), ROWS),
        (lambda: torch.compile(nn.Linear(16, 4), backend="eager"), ROWS),
    ],
    ids=["GPT", "convolution", "LSTM", "encoder", "dropout in eval", "no dropout", "compiled"],
)
def test_a_layer_that_draws_nothing_gives_the_same_bits_and_is_not_watched_again(module, inputs):
    module = module()

    def run():
        output = module(inputs)
        return output[0] if isinstance(output, tuple) else output

    plain = run()
    streams = LayerStreams(0)
    with streams.stream(0, module.training, step=0, microbatch=0) as stream:
        watched = run()
    assert torch.equal(plain, watched)
    assert not stream.drew  # fused attention must not be taken for a draw: it holds a lock
    streams.learn(0, module.training, stream)
    with streams.stream(0, module.training, step=0, microbatch=1) as stream:
        assert stream is None
    with streams.stream(0, not module.training, step=0, microbatch=1) as stream:
        assert stream is not None


def test_seeds_differ_in_every_coordinate_and_never_change():
    coordinates = [
        (s, t, m, n) for s in (0, 1, -1) for t in (0, 1, 11) for m in (0, 1) for n in (0, 1)
    ]
    seeds = {stream_seed(*where) for where in coordinates}
    assert len(seeds) == len(coordinates)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(3, 1, 4, 1) == 798236473643775199


def test_threads_that_lend_the_default_generator_do_not_disturb_each_other():
    def draw(seed):
        with RandomStream(seed):
            return torch.cat([torch.rand(64) if k % 2 else torch.randn(64) for k in range(200)])

    expected = [draw(seed) for seed in range(4)]
    before = torch.get_rng_state()
    found = [None] * 4

    def work(seed):
        found[seed] = draw(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operation_that_raises_gives_the_default_generator_back():
    before = torch.get_rng_state()
    with RandomStream(5), pytest.raises(RuntimeError):
        torch.randint(5, 2, (3,))
    assert torch.equal(torch.get_rng_state(), before)
    assert randomness._DEFAULT_GENERATOR_LOCK.acquire(blocking=False)
    randomness._DEFAULT_GENERATOR_LOCK.release()


class Sometimes(nn.Module):
    """Draws only once it is told to."""

    noisy = False

    def forward(self, value):
        return value + torch.randn_like(value) if self.noisy else value


def test_a_layer_that_starts_to_draw_is_noticed_and_watched_from_then_on():
    model = nn.Sequential(nn.Linear(16, 4), Sometimes())
    twin = nn.Sequential(nn.Linear(16, 4), Sometimes())
    twin.load_state_dict(model.state_dict())
    pipeline = pk.Pipeline(model, make_plan(model, 2, 2), loss=F.cross_entropy, seed=1)
    reference = SingleDevice(twin, 2, F.cross_entropy, seed=1)
    batch = make_batch(8)
    with pipeline, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        assert not caught
        model[1].noisy = twin[1].noisy = True
        pipeline.step(*batch)
        assert "drew random numbers for the first time" in str(caught.pop().message)
        reference._streams._quiet.clear()
        reference.step(*batch)
        for _ in range(2):
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
        assert not caught


def draws_late_in_steps(batches, noisy_from, audience=lambda: None):
    """What is warned of in a loop over minibatches when a layer begins to draw at one of them."""
    model = nn.Sequential(nn.Linear(16, 4), Sometimes())

    def start(module, inputs):
        calls.append(1)
        module.noisy = len(calls) > 2 * noisy_from  # of two microbatches each

    calls = []
    model[1].register_forward_pre_hook(start)
    plan = make_plan(model, 2, 2)
    with (
        pk.Pipeline(model, plan, loss=F.cross_entropy, seed=1) as pipeline,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in pipeline.steps(batches):
            audience()
        assert not caught or "drew random numbers for the first time" in str(caught[0].message)
        told = len(caught)
        list(pipeline.steps([make_batch(8), make_batch(8)]))
        assert len(caught) == told  # it is watched from then on
    return told


def test_a_layer_that_starts_to_draw_within_steps_is_noticed():
    assert draws_late_in_steps([make_batch(8)] * 10, noisy_from=5) >= 1


@pytest.mark.parametrize("where", ["loader", "loop"])
def test_a_layer_that_starts_to_draw_is_noticed_where_others_draw_as_well(where):
    draw = lambda: torch.rand(3)  # noqa: E731
    batches = (make_batch(8) for _ in range(10) if where == "loop" or draw().numel())
    assert draws_late_in_steps(batches, 5, draw if where == "loop" else lambda: None) >= 1


@pytest.mark.parametrize("where", ["loader", "loop"])
def test_callers_may_draw_while_steps_are_under_way(where):
    draw = lambda: torch.rand(3)  # noqa: E731
    batches = (make_batch(8) for _ in range(10) if where == "loop" or draw().numel())
    assert draws_late_in_steps(batches, 99, draw if where == "loop" else lambda: None) == 0


def test_a_draw_beside_the_callers_code_is_noticed_when_the_layer_draws_again():
    streams = LayerStreams(0)

    def run(layer, draws):
        with streams.stream(layer, True, step=0, microbatch=0) as stream:
            if draws:
                torch.rand(3)
        streams.learn(layer, True, stream)

    with streams.auditing() as audit:
        for layer in range(2):
            run(layer, draws=False)
        with audit.elsewhere():
            run(1, draws=True)
        assert not streams.is_quiet(0, training=True)
        with audit.elsewhere():
            run(0, draws=False)
            run(1, draws=True)
        assert streams.is_quiet(0, training=True)
        assert not streams.is_quiet(1, training=True)
        with pytest.warns(UserWarning, match="for the first time"), audit.elsewhere():
            run(1, draws=True)


def test_watching_all_layers_again_becomes_rare_where_callers_always_draw():
    streams = LayerStreams(0)
    num_watched = 0
    with streams.auditing() as audit:
        for _ in range(64):
            with audit.elsewhere():
                torch.rand(3)
            with streams.stream(0, True, step=0, microbatch=0) as stream:
                num_watched += stream is not None
            streams.learn(0, True, stream)
    assert num_watched == 7


def test_a_loss_that_draws_is_reproducible_too():
    def noisy_loss(output, targets):
        return F.cross_entropy(output + torch.randn_like(output), targets)

    losses = []
    for num_stages in (1, 2, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        with pk.Pipeline(
            model, make_plan(model, num_stages, 2), loss=noisy_loss, seed=1
        ) as pipeline:
            losses.append([pipeline.step(*make_batch(8)).item() for _ in range(2)])
        reference = SingleDevice(model, 2, noisy_loss, seed=1)
        losses.append([reference.step(*make_batch(8)).item() for _ in range(2)])
    assert losses == losses[:1] * 6
    assert losses[0][0] != losses[0][1]


class Checkpointed(nn.Module):
    """Recomputes itself in backward."""

    def __init__(self, dropout, use_reentrant):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = dropout
        self.use_reentrant = use_reentrant

    def inner(self, value):
        return F.dropout(torch.tanh(self.linear(value)), self.dropout)

    def forward(self, value):
        return checkpoint(self.inner, value, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_dropout_is_refused_since_its_mask_would_be_another(use_reentrant):
    # Megatron #6858: the wrong random state was restored on recompute.
    model = nn.Sequential(nn.Linear(16, 16), Checkpointed(0.5, use_reentrant), nn.Linear(16, 4))
    with (
        pk.Pipeline(model, make_plan(model, 2, 2, cuts=[1]), loss=F.cross_entropy) as pipeline,
        pytest.raises(StageError, match=r"op 1B0: .*keep dropout outside of what is checkpointed"),
    ):
        pipeline.step(*make_batch(8))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_without_dropout_beside_dropout_works(use_reentrant):
    losses, gradients = [], []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        inner = Checkpointed(0.0, use_reentrant)
        if not checkpointed:
            inner.forward = inner.inner
        model = nn.Sequential(nn.Linear(16, 16), inner, nn.Dropout(0.5), nn.Linear(16, 4))
        plan = make_plan(model, 2, 2, cuts=[1])
        with pk.Pipeline(model, plan, loss=F.cross_entropy, seed=1) as pipeline:
            losses.append(pipeline.step(*make_batch(8)))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*losses)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)
