"""Steps and loads that go without an error, and are not what people mean."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline_of(model, **options):
    return pk.Pipeline(model, make_plan(model, 2, 2), loss=cross_entropy, **options)


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch):
    monkeypatch.delenv("PENSTOCK_QUIET", raising=False)


@pytest.fixture
def said(capsys):
    """What was written on standard error since it was last asked."""
    return lambda: capsys.readouterr().err


def test_steps_that_train_nothing_are_told_of_once(said):
    with pipeline_of(make_mlp()) as pipeline:
        pipeline.step(*make_batch(8))
        assert not said()
        pipeline.step(*make_batch(8))
        assert "no optimizer, so step() changes no weight" in said()
        pipeline.step(*make_batch(8))
        assert not said()


def test_whoever_uses_or_clears_gradients_hears_nothing(said):
    model = make_mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline_of(model) as pipeline:
        pipeline.step(*make_batch(8))
        own.step()
        pipeline.step(*make_batch(8))
        own.zero_grad(set_to_none=True)
        pipeline.step(*make_batch(8))
        own.zero_grad(set_to_none=False)
        pipeline.step(*make_batch(8))
        own.step()
        for _ in range(2):
            pipeline.step(*make_batch(8), update=False)
        assert not said()


def test_fit_needs_an_optimizer():
    with (
        pipeline_of(make_mlp()) as pipeline,
        pytest.raises(pk.InputError, match=r"fit trains, and this Pipeline has no optimizer"),
    ):
        pk.fit(pipeline, [make_batch(8)])


def test_a_model_of_frozen_layers_alone_is_refused():
    model = make_mlp().requires_grad_(False)
    with pytest.raises(pk.InputError, match="no parameter of the model needs a gradient"):
        pipeline_of(model, optimizer=sgd)
    with pipeline_of(model) as pipeline:
        assert pipeline.evaluate_loss(*make_batch(8)).isfinite()


def test_a_step_in_evaluation_mode_is_told_of_where_it_matters(said):
    model = nn.Sequential(*make_mlp(), nn.Dropout(0.5))
    with pipeline_of(model, optimizer=sgd) as pipeline:
        pipeline.step(*make_batch(8))
        model.eval()
        assert not said()
        pipeline.step(*make_batch(8))
        assert "evaluation mode, in which step() trains it without what Dropout does" in said()
        pipeline.step(*make_batch(8))
        assert not said()
    with pipeline_of(make_mlp(0.0).eval(), optimizer=sgd) as pipeline:
        pipeline.step(*make_batch(8))
    assert not said()


def test_a_folder_that_is_not_there_is_said(tmp_path, said):
    with pipeline_of(make_mlp(), optimizer=sgd) as pipeline:
        assert pipeline.load(tmp_path / "first") is None
        text = f"no complete checkpoint in {tmp_path / 'first'} yet, so training begins at step 0"
        assert text in said()
        pipeline.step(*make_batch(8))
        pipeline.save(tmp_path / "first", background=False)
        with pytest.warns(RuntimeWarning, match=r"in .*frist, .*first has some") as seen:
            assert pipeline.load(tmp_path / "frist") is None
        assert seen[0].filename == __file__
        with pytest.raises(pk.FileError, match="so there are no weights to take"):
            pipeline.load(tmp_path / "second", weights_only=True)
        assert pipeline.load(tmp_path / "first") == 1
