"""What the comparison of ways to learn from a stream computes is what their names say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.streaming.learners import DoubleBuffered, Learner, Seldom, Sideways, Stashed
from benchmarks.streaming.runs import NUM_WINDOWS, Book, Setting
from benchmarks.streaming.sources import SOURCES, change, shapes
from benchmarks.streaming.speed_up import Shares
from penstock import versions
from penstock.trial.reference.delayed_replay import DelayedReplay


def small_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).double()


def sgd(lr):
    return lambda own, stage: torch.optim.SGD(own, lr=lr, momentum=0.5)


def random_frames(count):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, count, 1, 3, generator=generator, dtype=torch.float64)
    return list(zip(*rows, strict=True))


@pytest.mark.parametrize(
    ("learner", "policy", "per_update"),
    [(Stashed, versions.Stash(), 1), (DoubleBuffered, versions.DoubleBuffer(), 4)],
)
def test_policies_of_pipedream_are_what_their_replay_computes(learner, policy, per_update):
    frames, mine, wanted = random_frames(16), small_model(), small_model()
    ours = learner(mine, 4, F.mse_loss, sgd(0.1))
    told = [ours.see(number, *frame, True) for number, frame in enumerate(frames)]
    replay = DelayedReplay(
        wanted, [1] * 4, policy, per_update, F.mse_loss,
        lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.5),
    )  # fmt: skip
    groups = [frames[start : start + per_update] for start in range(0, 16, per_update)]
    batches = [tuple(map(torch.cat, zip(*group, strict=True))) for group in groups]
    losses = torch.tensor([seen.loss for seen in told]).view(-1, per_update).mean(1)
    torch.testing.assert_close(losses, torch.stack(replay.train(batches)).float())
    torch.testing.assert_close(mine.state_dict(), wanted.state_dict())


@pytest.mark.parametrize("learner", [Sideways, Stashed, DoubleBuffered])
def test_gradients_are_exact_where_neither_frames_nor_weights_move(learner):
    ours = learner(small_model(), 4, F.mse_loss, sgd(0.0))
    for number in range(12):
        ours.see(number, *random_frames(1)[0], number > 8)
    assert [kept == pytest.approx([1.0] * 3) for kept in ours.cosines] == [True] * 4


def test_a_gradient_that_goes_through_another_frame_is_not_exact_but_at_the_last_stage():
    ours = Sideways(small_model(), 4, F.mse_loss, sgd(0.0))
    for number, frame in enumerate(random_frames(12)):
        ours.see(number, *frame, number == 11)
    *others, last = [kept[0] for kept in ours.cosines]
    assert last == pytest.approx(1.0)
    assert all(abs(cosine) < 0.999 for cosine in others)


def test_exact_gradients_meet_the_state_that_their_frame_met():
    """Where nothing is learned, the last stage's gradient is exact, whatever state there is."""
    source = SOURCES["recurrent"]
    ours = Sideways(source.build(0), 4, source.loss, sgd(0.0))
    for number, frame in enumerate(source.make(10)):
        ours.see(number, *frame, number == 9)
    *others, last = [kept[0] for kept in ours.cosines]
    assert last == pytest.approx(1.0, abs=1e-5)
    assert max(others) < 0.99999


def test_one_device_sees_every_nth_frame():
    frames, whole, seldom = random_frames(9), small_model(), small_model()
    alone = Learner(whole, 4, F.mse_loss, sgd(0.1))
    for number, frame in enumerate(frames[::4]):
        alone.see(number, *frame, False)
    ours = Seldom(seldom, 4, F.mse_loss, sgd(0.1))
    told = [ours.see(number, *frame, False) for number, frame in enumerate(frames)]
    assert [number for number, seen in enumerate(told) if seen] == [0, 4, 8]
    torch.testing.assert_close(whole.state_dict(), seldom.state_dict(), rtol=0, atol=0)


def test_runs_are_kept_with_their_infinite_losses(tmp_path):
    source, file = SOURCES["slow"], tmp_path / "results.jsonl"
    frames = source.make(12)
    calm = Setting("slow", "stash", 2, "sgd", 0.01, True, 0, 12)
    wild = Setting("slow", "exact", 2, "sgd", 1e9, False, 0, 12)
    ran = {setting: Book(file).run(source, frames, setting) for setting in (calm, wild)}
    assert ran[calm].loss < 1 < ran[wild].loss == float("inf")
    assert len(ran[calm].curve) == NUM_WINDOWS
    kept = Book(file).run(None, None, calm)
    assert kept.loss == pytest.approx(ran[calm].loss, rel=1e-4)
    assert Book(file).run(None, None, wild).loss == float("inf")


def test_faster_shapes_change_more():
    changes = [change(shapes(40, speed), 6) for speed in (0.05, 0.3, 2.0)]
    assert all(less < more for less, more in pairwise(changes))


def test_a_device_has_neighbouring_layers_and_the_slowest_one_limits_the_rest():
    shares = Shares((1.0, 1.0, 2.0, 4.0), 2)
    assert shares.stages == (4.0, 4.0)
    assert shares.speed_up == 2.0
    assert shares._replace(num_devices=4).speed_up == 2.0
