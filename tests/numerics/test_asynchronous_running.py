"""How asynchronous pipelines run: delays and versions as recorded, stability, ends, failures."""

import math

import pytest
import torch
from torch import nn

import penstock as pk
from penstock import versions
from penstock.base.errors import InputError, ModelError, StageError
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import more
from tests.kit.streams import batches, cuts_of, layered_model, plan_for
from tests.numerics.test_asynchronous import (
    OPTIMIZERS,
    POLICIES,
    SIZES,
    assert_equal,
    train_both,
)

STEADY = ("stash", "latest", "vertical sync", "2bw", "stash per minibatch", "pipeoptim")


def pipeline_of(model, plan, optimizer=OPTIMIZERS["sgd"], **how):
    how = {"loss": nn.functional.mse_loss, "seed": 3, **how}
    return pk.Pipeline(model, plan, optimizer=optimizer, **how)


def replay_of(model, plan, optimizer=OPTIMIZERS["sgd"]):
    loss = nn.functional.mse_loss
    cuts, count = cuts_of(plan), plan.num_microbatches
    return DelayedReplay(model, cuts, plan.versions, count, loss, optimizer, seed=3)


@pytest.mark.parametrize("num_stages", [more(1), 2, more(3), 4])
@pytest.mark.parametrize("policy", STEADY)
def test_recorded_delays_and_versions_are_those_of_the_formulas(policy, num_stages):
    plan = plan_for(POLICIES[policy], num_stages, microbatches=4)
    with pipeline_of(layered_model(), plan) as pipeline:
        list(pipeline.steps(batches([8] * 8)))
        delays, held = pipeline.timeline.delays, pipeline.held_versions
        recorded = [span for span in pipeline.timeline.spans if span.version is not None]
    bytes_of = [sum(p.nbytes for p in stage.parameters()) for stage in pipeline.stages.values()]
    for stage in range(num_stages):
        place = plan.place(stage)
        steady = [delays[stage][k] for k in range(12, 28)]
        assert sum(steady) / len(steady) == plan.versions.delay(place)
        assert held[stage].versions == plan.versions.versions_held(place)
        assert held[stage].version_bytes == held[stage].versions * bytes_of[stage]
    predicted = plan.simulate(8).spans
    said = {(span.op, span.rank): span.version for span in predicted}
    assert all(said[span.op, span.rank] == span.version for span in recorded)


def test_2bw_reads_the_published_versions():
    plan = plan_for(versions.DoubleBuffer(), 4, microbatches=4)
    with pipeline_of(layered_model(), plan) as pipeline:
        list(pipeline.steps(batches([8] * 5)))
        spans = pipeline.timeline.spans
    for span in spans:
        if span.op.kind in "FB":
            k = span.op.microbatch + 1  # the paper counts from 1
            assert span.version == max((k - 1) // 4 - 1, 0)


def test_weights_that_never_change_are_shared_by_all_versions():
    model = layered_model()
    model[0][0].weight.requires_grad_(False)
    plan = plan_for(versions.Stash(), 4, microbatches=4, model=model)
    with pipeline_of(model, plan) as pipeline:
        list(pipeline.steps(batches([8] * 4)))
        held = pipeline.held_versions[0]
    frozen = model[0][0].weight.nbytes
    trained = sum(p.nbytes for p in pipeline.stages[0].parameters()) - frozen
    assert held.version_bytes == 4 * trained


def test_corrections_need_one_more_buffer_and_no_version():
    plan = plan_for(versions.PipeMare(t2=0.5, updates="microbatch"), 3, microbatches=4)
    with pipeline_of(layered_model(), plan) as pipeline:
        list(pipeline.steps(batches([8] * 4)))
        held = pipeline.held_versions
    assert [one.versions for one in held] == [1, 1, 1]
    assert [one.extra_bytes for one in held] == [held[0].version_bytes, held[1].version_bytes, 0]


@pytest.mark.parametrize("policy", ["stash", "vertical sync", "2bw", "latest", "pipemare t2"])
def test_activations_in_flight_are_as_simulated_and_weights_are_none_of_them(policy):
    plan = plan_for(POLICIES[policy], 4, microbatches=4)
    alone = plan_for(versions.Flush(), 4, microbatches=1)
    data = batches([8] * 6)
    with pipeline_of(layered_model(), alone, count_memory=True) as pipeline:
        pipeline.step(*batches([2])[0])
        one = [peak.activation_bytes for peak in pipeline.peaks]
    with pipeline_of(layered_model(), plan, count_memory=True) as pipeline:
        losses = list(pipeline.steps(data))
        peaks = pipeline.peaks
    predicted = plan.simulate(6).peak_activations
    assert [peak.microbatches for peak in peaks] == list(predicted) == [4, 3, 2, 1]
    assert [p.activation_bytes for p in peaks] == [
        b * n for b, n in zip(one, predicted, strict=True)
    ]
    with pipeline_of(layered_model(), plan) as pipeline:
        assert losses == list(pipeline.steps(data))


class Scalar(nn.Module):
    """Multiplies by a weight, if it has one."""

    def __init__(self, trained):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64)) if trained else None

    def forward(self, value):
        return value if self.weight is None else value * self.weight


def stays_bounded(num_stages, rate, policy):
    """SGD on ½w², whose curvature is 1, with the delay of the first of so many stages."""
    model = nn.Sequential(Scalar(True), *[Scalar(False) for _ in range(num_stages - 1)])
    plan = plan_for(policy, num_stages, microbatches=50, model=model)
    ones = torch.ones(50, 1, dtype=torch.float64)
    batch = ones, ones

    with pk.Pipeline(
        model,
        plan,
        loss=lambda output, _: output.square().mean() / 2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        stop_at_nan=False,
    ) as pipeline:
        sizes = []
        for loss in pipeline.steps([batch] * 24):
            sizes.append(float(loss))
    return max(sizes[-8:]) < max(sizes[8:16])


@pytest.mark.parametrize(
    ("delay", "policy"),
    [
        more(0, versions.Stash()),
        more(1, versions.Stash()),
        (1, versions.VerticalSync()),
        (2, versions.Stash()),
        more(2, versions.VerticalSync()),
        more(3, versions.Stash()),
    ],
)
def test_the_bound_of_stability_is_met_to_three_digits(delay, policy):
    bound = 2 * math.sin(math.pi / (4 * delay + 2))
    assert stays_bounded(delay + 1, bound * 0.999, policy)
    assert not stays_bounded(delay + 1, bound * 1.001, policy)


@pytest.mark.parametrize("policy", ["stash", "2bw", "latest", "pipemare"])
def test_a_loop_that_is_left_drains(policy):
    plan = plan_for(POLICIES[policy], 3, microbatches=4)
    model, other = layered_model(), layered_model()
    data = batches([8] * 9)
    with pipeline_of(model, plan) as pipeline:
        for seen, _ in enumerate(pipeline.steps(data), start=1):
            if seen == 2:
                break
        fed = pipeline._step  # how many minibatches were under way
        assert 2 < fed <= len(data)
        pipeline.evaluate(data[0][0])
    replay = replay_of(other, plan)
    replay.train(data[:fed])
    exactly = policy != "pipemare"
    assert_equal((model, []), (other, []), exactly)


def test_a_loader_that_fails_leaves_a_drained_pipeline():
    plan = plan_for(versions.Stash(), 3, microbatches=4)
    model, other = layered_model(), layered_model()
    data = batches([8] * 5)

    def loader():
        yield from data
        raise KeyError("no such file")

    with pipeline_of(model, plan) as pipeline:
        with pytest.raises(KeyError):
            list(pipeline.steps(loader()))
        pipeline.evaluate(data[0][0])
    replay = replay_of(other, plan)
    replay.train(data)
    assert_equal((model, []), (other, []))


def test_a_step_is_a_stream_of_one_minibatch_and_streams_follow_each_other():
    plan = plan_for(versions.Stash(), 3, microbatches=4)
    model, other = layered_model(), layered_model()
    data = batches([8, 8, 4, 8])
    with pipeline_of(model, plan, OPTIMIZERS["adam"]) as pipeline:
        losses = [pipeline.step(*one) for one in data]
    replay = replay_of(other, plan, OPTIMIZERS["adam"])
    assert_equal((model, losses), (other, [replay.train([one])[0] for one in data]))


def test_a_failure_in_mid_stream_is_named_by_its_own_number():
    plan = plan_for(versions.Stash(), 3, microbatches=4)
    data = batches([8] * 6)
    data[4] = (data[4][0], data[4][1] * float("nan"))
    with (
        pipeline_of(layered_model(), plan) as pipeline,
        pytest.raises(StageError, match=r"stage 2, microbatch 16, op 2F16: .*the loss is nan"),
    ):
        list(pipeline.steps(data))


def test_a_loss_that_may_be_nan_does_not_stop_the_stream():
    plan = plan_for(versions.Stash(), 2, microbatches=2)
    data = batches([4] * 4)
    data[2] = (data[2][0], data[2][1] * float("nan"))
    with pipeline_of(layered_model(), plan, stop_at_nan=False) as pipeline:
        losses = list(pipeline.steps(data))
    assert [bool(loss.isnan()) for loss in losses] == [False, False, True, True]


@pytest.mark.parametrize("policy", ["stash", "2bw", "pipemare"])
def test_schedulers_clipping_per_stage_and_sums_follow_the_replay(policy):
    plan = plan_for(POLICIES[policy], 3, microbatches=4)
    engine, replay, _, _ = train_both(
        plan,
        batches([8] * 5),
        OPTIMIZERS["momentum"],
        clip_stage_norm=0.05,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    )
    assert_equal(engine, replay, exactly=policy != "pipemare")


def test_recomputing_stages_train_the_same():
    for policy in ("stash", "2bw"):
        plan = plan_for(POLICIES[policy], 3, microbatches=4)
        for how in ("stage", "layers"):
            engine, replay, _, _ = train_both(
                plan.recomputing(how), batches([8] * 5), OPTIMIZERS["adam"]
            )
            assert_equal(engine, replay)


class Spying(nn.Module):
    """Writes down its weight whenever it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.seen = []

    def forward(self, value):
        self.seen.append(self.weight.detach().clone())
        return torch.tanh(value @ self.weight)


@pytest.mark.parametrize(
    "policy",
    [
        versions.PipeMare(t2=0.5, updates="microbatch"),
        versions.Predict(rule="spectrain"),
        versions.Latest(),
    ],
)
def test_layers_and_stages_that_run_again_read_the_same_weights(policy):
    def seen(how):
        torch.manual_seed(2)
        model = nn.Sequential(*[Spying() for _ in range(4)])
        plan = plan_for(policy, 4, microbatches=4, model=model).recomputing(how)
        with pipeline_of(model, plan, OPTIMIZERS["momentum"]) as pipeline:
            list(pipeline.steps(batches([8] * 4)))
        return [layer.seen for layer in model]

    for by_stage, by_layer in zip(seen("stage"), seen("layers"), strict=True):
        assert len(by_stage) == len(by_layer) == 2 * 16
        for one, other in zip(by_stage, by_layer, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_batch_norm_sees_every_microbatch_in_order():
    def build():
        torch.manual_seed(4)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*layers).double()

    model, other = build(), build()
    plan = plan_for(versions.Stash(), 3, microbatches=4, model=model)
    with pipeline_of(model, plan) as pipeline:
        losses = list(pipeline.steps(batches([16] * 5)))
    replay = replay_of(other, plan)
    assert_equal((model, losses), (other, replay.train(batches([16] * 5))))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"clip_norm": 1.0}, "clip_norm needs the gradients of all stages.*clip_stage_norm"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "a grad_scaler needs.*bfloat16"),
        ({"batch_norm": "minibatch"}, "needs a flush"),
        ({"optimizer": None}, "give optimizer"),
    ],
)
def test_what_needs_a_flush_is_refused(how, message):
    plan = plan_for(versions.Stash(), 2, microbatches=2)
    how = {"loss": nn.functional.mse_loss, "optimizer": OPTIMIZERS["sgd"], **how}
    with pytest.raises(InputError, match=message):
        pk.Pipeline(layered_model(), plan, **how)


def test_accumulating_over_calls_is_refused():
    plan = plan_for(versions.Stash(), 2, microbatches=2)
    with (
        pipeline_of(layered_model(), plan) as pipeline,
        pytest.raises(InputError, match="updates as it goes"),
    ):
        pipeline.step(*batches([4])[0], update=False)


def test_autocast_goes_with_stashed_versions_only():
    def run(policy):
        model = layered_model().float()
        plan = plan_for(policy, 2, microbatches=2, model=model)
        data = [(x.float(), y.float()) for x, y in batches([4] * 4)]
        with pipeline_of(model, plan) as pipeline, torch.autocast("cpu", torch.bfloat16):
            list(pipeline.steps(data))

    run(versions.Stash())
    with pytest.raises(StageError, match="autocast makes copies of the weights"):
        run(versions.Latest())


def test_tied_weights_of_two_stages_are_refused_and_of_one_are_not():
    def tied(first, second):
        model = layered_model()
        model[second][0].weight = model[first][0].weight
        return model

    apart, together = tied(0, 4), tied(0, 1)
    plan = plan_for(versions.Stash(), 2, microbatches=2, model=apart)
    with pytest.raises(ModelError, match="tied between stages 0, 1"):
        pipeline_of(apart, plan)
    plan = plan_for(versions.Stash(), 2, microbatches=2, model=together)
    other = tied(0, 1)
    replay = replay_of(other, plan)
    with pipeline_of(together, plan) as pipeline:
        losses = list(pipeline.steps(batches([4] * 4)))
    assert_equal((together, losses), (other, replay.train(batches([4] * 4))))


@pytest.mark.parametrize("policy", ["stash", "2bw", "pipemare", "vertical sync"])
def test_minibatches_of_any_size_follow_each_other(policy):
    plan = plan_for(POLICIES[policy], 4, microbatches=4)
    sizes = (8, 2, 1, 8, 3, 8, 8, 1)
    if policy == "2bw":
        # A minibatch too short for two versions ends the stream, and the next begins one.
        model, other = layered_model(), layered_model()
        data = batches(sizes)
        with pipeline_of(model, plan) as pipeline:
            losses = list(pipeline.steps(data))
        replay = replay_of(other, plan)
        starts = ((0, 2), (2, 3), (3, 8))
        expected = [loss for start, end in starts for loss in replay.train(data[start:end])]
        assert_equal((model, losses), (other, expected))
        engine, replayed, _, _ = train_both(plan, data, OPTIMIZERS["sgd"])
        assert_equal(engine, replayed)
    else:
        engine, replay, _, _ = train_both(plan, batches(sizes), OPTIMIZERS["adam"])
        assert_equal(engine, replay, exactly=policy != "pipemare")


def test_layers_may_be_frozen_and_freed_between_streams():
    model = layered_model()
    model[0].requires_grad_(False)
    plan = plan_for(versions.Stash(), 3, microbatches=4, model=model)
    with pipeline_of(model, plan) as pipeline:
        list(pipeline.steps(batches([8] * 3)))
        before = model[0][0].weight.detach().clone()
        assert torch.equal(before, layered_model()[0][0].weight)
        model[0].requires_grad_(True)
        list(pipeline.steps(batches([8] * 3)))
        assert not torch.equal(before, model[0][0].weight)
        assert pipeline.held_versions[0].versions == 3


def test_a_plan_with_versions_is_a_file():
    plan = plan_for(versions.PipeMare(t1=5, t2=0.3), 3, microbatches=4)
    assert pk.Plan.from_json(plan.to_json()) == plan
    other = plan.with_versions(versions.Stash())
    assert [stage.weight_versions for stage in other.stages] == [3, 2, 1]
    assert [stage.weight_versions for stage in plan.stages] == [2, 2, 1]


def test_hooks_on_parameters_are_refused():
    model = layered_model()
    model[0][0].weight.register_hook(lambda gradient: gradient)
    plan = plan_for(versions.Stash(), 2, microbatches=2, model=model)
    with pytest.raises(ModelError, match="has hooks"):
        pipeline_of(model, plan)


def test_buffers_that_several_replicas_write_are_refused():
    model = layered_model()
    nn.utils.parametrizations.spectral_norm(model[0][0])
    plan = plan_for(versions.Stash(), None, microbatches=4, replicas="2-1", model=model)
    with (
        pipeline_of(model, plan) as pipeline,
        pytest.raises(StageError, match=r"has written the buffer .*\._[uv]'"),
    ):
        list(pipeline.steps(batches([8] * 3)))


def test_prediction_knows_its_optimizers():
    plan = plan_for(versions.Predict(), 2, microbatches=2)
    with pytest.raises(InputError, match="not of RMSprop"):
        pipeline_of(layered_model(), plan, torch.optim.RMSprop)


@pytest.mark.parametrize("replicas", ["2-1", "1-3", "2-1-1", "2-2"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replicated_stages_that_flush_equal_one_device(schedule, replicas):
    plan = plan_for(versions.Flush(), None, microbatches=4, replicas=replicas, schedule=schedule)
    model, other = layered_model(), layered_model()
    reference = SingleDevice(other, 4, nn.functional.mse_loss, OPTIMIZERS["adam"], seed=3)
    with pipeline_of(model, plan, OPTIMIZERS["adam"]) as pipeline:
        losses = [pipeline.step(*one) for one in batches((8, 8, 7, 2))]
    expected = []
    for one in batches((8, 8, 7, 2)):
        expected.append(reference.step(*one))
    assert_equal((model, losses), (other, expected), exactly=False)


@pytest.mark.parametrize("policy", ["flush", "stash"])
def test_replicas_evaluate_any_number_of_rows(policy):
    plan = plan_for(POLICIES[policy], None, microbatches=4, replicas="3-1")
    model = layered_model()
    with pipeline_of(model, plan) as pipeline:
        for rows in (1, 2, 3, 7):
            inputs = batches([rows])[0][0]
            expected = layered_model().eval()(inputs)
            torch.testing.assert_close(pipeline.evaluate(inputs), expected.detach())


def test_a_stream_shorter_than_the_replicas_is_refused():
    plan = plan_for(versions.Stash(), None, microbatches=4, replicas="3-1")
    with (
        pipeline_of(layered_model(), plan) as pipeline,
        pytest.raises(InputError, match="a stage has 3 replicas, but there are only 2"),
    ):
        pipeline.step(*batches([2])[0])


def test_a_loss_that_is_a_sum_is_neither_averaged_nor_scaled():
    plan = plan_for(versions.Stash(), None, microbatches=4, replicas="2-1")
    optimizer = OPTIMIZERS["sgd"]
    model, other = layered_model(), layered_model()
    how = {"seed": 3, "reduction": "sum"}

    def loss(output, target):
        return (output - target).square().sum() / 50

    with pk.Pipeline(model, plan, loss=loss, optimizer=optimizer, **how) as pipeline:
        losses = list(pipeline.steps(batches(SIZES)))
    replay = DelayedReplay(
        other, cuts_of(plan), plan.versions, 4, loss, optimizer, replicas=(2, 1), **how
    )
    assert_equal((model, losses), (other, replay.train(batches(SIZES))))


def test_policies_check_their_plans():
    with pytest.raises(InputError, match="for the schedule pipedream, but the plan's is 1f1b"):
        plan_for(versions.Stash(), 2, microbatches=2, schedule="1f1b")
    with pytest.raises(InputError, match="2bw with 4 stages needs minibatches of 3"):
        plan_for(versions.DoubleBuffer(), 4, microbatches=2)
    with pytest.raises(InputError, match="vertical sync needs as many replicas"):
        plan_for(versions.VerticalSync(), None, microbatches=4, replicas="2-1")
