"""A pipeline in a loop of one's own: its loss goes backward like any other."""

import pytest
import torch
import torch.nn.functional as F

from penstock.base.errors import InputError, StageError
from penstock.interop.loss_pipeline import LossPipeline, OutputsAreGone, let_state_follow
from penstock.interop.spread import Spread
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.one_device import OneDevice
from tests.kit.spilling import spilled_plan


def loss_pipeline(model, schedule="1f1b", loss=F.cross_entropy):
    return LossPipeline(model, Spread(make_plan(model, 2, 4, schedule)), loss)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "gpipe"])
def test_its_gradients_are_those_of_one_device_to_the_bit(schedule):
    ours, theirs = make_mlp(dropout=0), make_mlp(dropout=0)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, theirs)]
    device = OneDevice(theirs, 4)
    with loss_pipeline(ours, schedule) as split:
        for seed in range(3):
            loss = split.loss_of_batch(*make_batch(seed=seed))
            assert ours[0].weight.grad is None  # until it goes backward
            loss.backward()
            assert loss.detach().equal(device.step(*make_batch(seed=seed)))
            assert all(map(torch.equal, gradients(ours), gradients(theirs)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert split.plan.schedule == schedule
        assert split.pipeline.timeline.makespan > 0
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_batches_accumulate_times_what_their_losses_are_multiplied_by():
    ours, theirs = make_mlp(dropout=0), make_mlp(dropout=0)
    ours[3].requires_grad_(False)
    theirs[3].requires_grad_(False)
    device = OneDevice(theirs, 4)
    with loss_pipeline(ours) as split:
        for seed in range(2):
            halved = 2 * split.loss_of_batch(*make_batch(seed=seed)) / 4
            halved.backward()
            device.step(*make_batch(seed=seed), share=0.5)
    for ours_of, theirs_of in zip(gradients(ours), gradients(theirs), strict=True):
        assert (ours_of is None) == (theirs_of is None)
        if ours_of is not None:
            torch.testing.assert_close(ours_of, theirs_of)


def test_random_layers_draw_by_the_number_of_the_batch():
    model = make_mlp()
    with loss_pipeline(model) as split:
        first, other, again = (
            split.loss_of_batch(*make_batch(), number=at).item() for at in (5, 6, 5)
        )
    assert first == again != other


def test_it_is_built_alike_in_inference_mode():
    model = make_mlp(dropout=0)
    with loss_pipeline(model) as split:
        with torch.inference_mode():
            outputs = split.evaluate(make_batch()[0].clone())
        split.loss_of_batch(*make_batch()).backward()
    torch.testing.assert_close(outputs, model(make_batch()[0]).detach())
    assert all(gradient is not None for gradient in gradients(model))


def test_without_a_plan_one_is_made_and_no_random_number_is_missed():
    model = make_mlp()
    before = torch.get_rng_state()
    with LossPipeline(model, Spread(stages=2, schedule="1f1b"), F.cross_entropy) as split:
        split.loss_of_batch(*make_batch()).backward()
        assert len(split.plan.stages) == 2
        assert split.plan.num_microbatches == 4
    assert torch.get_rng_state().equal(before)


def test_a_loss_goes_backward_once():
    with loss_pipeline(make_mlp()) as split:
        loss = split.loss_of_batch(*make_batch())
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match="went backward already"):
            loss.backward()


def test_a_failed_batch_leaves_the_gradients_of_others():
    def loss(outputs, targets):
        if targets.max() > 2:
            raise ValueError("odd targets")
        return F.cross_entropy(outputs, targets)

    model = make_mlp()
    inputs, targets = make_batch()
    with loss_pipeline(model, loss=loss) as split:
        split.loss_of_batch(inputs, targets.clamp(max=2)).backward()
        before = gradients(model)
        with pytest.raises(StageError, match="odd targets"):
            split.loss_of_batch(inputs, targets)
        assert all(one is other for one, other in zip(before, gradients(model), strict=True))


def test_what_was_closed_starts_again_with_the_same_plan():
    model = make_mlp(dropout=0)
    with LossPipeline(model, Spread(stages=2, schedule="1f1b"), F.cross_entropy) as split:
        loss = split.loss_of_batch(*make_batch())
        plan = split.plan
        split.close()
        assert split.pipeline.timeline.makespan > 0
        assert split.loss_of_batch(*make_batch()).equal(loss)
        assert split.plan is plan


def test_losses_are_means_over_what_the_weight_counts():
    model = make_mlp(dropout=0)
    inputs, targets = make_batch()
    targets = targets.where(torch.arange(len(targets)) > 4, -100)  # of the first microbatch, none
    with loss_pipeline(model) as split:
        loss = split.loss_of_batch(
            inputs[2:], targets[2:], weight=lambda wanted: (wanted != -100).sum()
        )
        with pytest.raises(InputError, match="inputs have 13 rows, but targets have 11"):
            split.loss_of_batch(inputs, targets[2:])
    torch.testing.assert_close(loss.detach(), F.cross_entropy(model(inputs), targets).detach())


def test_there_is_no_plan_before_the_first_batch():
    with pytest.raises(InputError, match="no pipeline before the first batch"):
        _ = loss_pipeline(make_mlp()).plan


def test_plans_whose_gradients_would_not_be_found_are_refused():
    with pytest.raises(InputError, match="never flushes"):
        Spread(make_plan(make_mlp(), 2, 4, "pipedream"))
    with pytest.raises(InputError, match="leave memory"):
        Spread(spilled_plan(make_mlp()))
    with pytest.raises(InputError, match="the plan is"):
        Spread("plan.json")
    with pytest.raises(InputError, match="microbatches"):
        Spread(microbatches=0)


def test_one_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one of 2; start it with plain python"):
        loss_pipeline(make_mlp())


def test_outputs_that_are_gone_say_so():
    gone = OutputsAreGone(loss=torch.tensor(1.0))
    assert gone.loss == 1
    for asked in (lambda: gone.logits, lambda: gone["logits"], lambda: torch.exp(gone)):
        with pytest.raises(InputError, match="use nothing but the loss"):
            asked()


def test_what_an_optimizer_keeps_follows_its_parameters():
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}
    let_state_follow(optimizer)
    kept = optimizer.state[weight]
    assert kept["exp_avg"].is_meta
    assert kept["step"] == 3
