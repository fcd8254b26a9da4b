"""Every stage on a device of its own: the numbers are the CPU's to the bit, nothing waits, and the
model never lies on one device. The devices are emulated ones, which raise where a wait, a copy or
a keep-alive is missing. ``pytest -p tests.kit.accelerator.everywhere`` runs other tests on them."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock import versions
from penstock.base.errors import InputError, StageError
from penstock.demo import gpt
from penstock.engine.device.accelerators import accelerators
from penstock.engine.device.queue import Stamps
from penstock.trial import Workload, prove
from tests.kit import streams
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.masked import masked_batch, masked_encoder
from tests.kit.on_devices import (
    EMULATED,
    FAMILIES,
    FEATURES,
    POLICIES,
    check_family,
    check_feature,
    check_policy,
    check_scaling,
    check_tied,
    on_cpu,
)
from tests.kit.one_device import assert_same
from tests.kit.small_workload import workload
from tests.kit.training import adamw, pipeline_of, sgd
from tests.numerics.test_one_logical_model_shared import TiedGPT, token_batch

pytestmark = pytest.mark.usefixtures("accelerator")


class Recurrent(nn.Module):
    """An LSTM that hands on its output alone."""

    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width)

    def forward(self, value):
        return self.lstm(value[None])[0][0]


SPREAD = ["emu:1", "emu:3", "emu:0", "emu:1"]
"""Of four ranks: the first and the last share a device."""


@pytest.mark.parametrize(("schedule", "net"), FAMILIES)
def test_every_family_trains_as_on_the_cpu(schedule, net):
    check_family(EMULATED, SPREAD, schedule, net)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(("build", "options"), FEATURES)
def test_features_train_as_on_the_cpu(schedule, build, options):
    check_feature(EMULATED, ["emu:0", "emu:2"], schedule, build, options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_tied_weights_and_skips_cross_devices(schedule):
    check_tied(EMULATED, ["emu:0", "emu:1"], schedule)


def test_autocast_and_loss_scaling_are_those_of_the_device():
    check_scaling(EMULATED, ["emu:0", "emu:1"])


@pytest.mark.parametrize(("policy", "replicas"), POLICIES, ids=str)
def test_asynchronous_training_is_that_on_the_cpu(policy, replicas):
    check_policy(EMULATED, SPREAD, policy, replicas)


@pytest.mark.parametrize(
    ("before", "after"), [("cpu", SPREAD), (SPREAD, "cpu"), (SPREAD, ["emu:2", "emu:0"])], ids=str
)
def test_a_checkpoint_goes_from_any_devices_to_any_others(before, after, tmp_path):
    def train(devices, first, stop, load=None):
        num_ranks = 2 if len(devices) == 2 else 4
        options = {"optimizer": adamw, "clip_norm": 0.1, "devices": devices}
        with pipeline_of(make_mlp(dropout=0.0), "1f1b", num_ranks, **options) as pipeline:
            if load is not None:
                pipeline.load(load)
            losses = [pipeline.step(*make_batch(seed=step)) for step in range(first, stop)]
            losses += [pipeline.evaluate(make_batch()[0])]
        return on_cpu(losses)

    def saved(devices, stop, folder):
        options = {"optimizer": adamw, "clip_norm": 0.1, "devices": devices}
        with pipeline_of(make_mlp(dropout=0.0), "1f1b", 4, **options) as pipeline:
            for step in range(stop):
                pipeline.step(*make_batch(seed=step))
            pipeline.save(folder)
            pipeline.step(*make_batch(seed=9))  # while that is written

    saved(before, 2, tmp_path)
    rest = train(after, 2, 4, load=tmp_path)
    whole = train("cpu", 0, 4)
    assert all(map(torch.equal, rest, whole[2:]))


@pytest.mark.parametrize("inputs_on", ["cpu", "pinned", "emu:1", "emu:3", "emu:2"])
@pytest.mark.parametrize("targets_on", ["cpu", "emu:3", "emu:0"])
def test_data_may_come_from_anywhere(inputs_on, targets_on):
    def there(tensor, place):
        return tensor.pin_memory() if place == "pinned" else tensor.to(place)

    model = make_mlp()
    found = []
    for devices in ("cpu", ["emu:1", "emu:3"]):
        ours = copy.deepcopy(model)
        losses = []
        with pipeline_of(ours, optimizer=adamw, devices=devices) as pipeline:
            for seed in range(3):
                inputs, targets = make_batch(seed=seed)
                if devices != "cpu":
                    inputs, targets = there(inputs, inputs_on), there(targets, targets_on)
                losses.append(pipeline.step(inputs, targets).cpu())
                inputs.zero_()  # whoever called may use it again
        found.append((torch.stack(losses), ours))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1])


def test_each_stage_is_on_its_ranks_device_and_so_is_all_that_it_makes(accelerator):
    model = make_mlp()
    parameters = [*model.parameters()]
    with pipeline_of(model, optimizer=adamw, devices=["emu:2", "emu:1"]) as pipeline:
        loss = pipeline.step(*make_batch())
        held = [
            {str(tensor.device) for tensor in stage.state_dict().values()}
            for stage in pipeline.stages.values()
        ]
        outputs = pipeline.evaluate(make_batch()[0])
    assert held == [{"emu:2"}, {"emu:1"}]
    assert str(loss.device) == str(outputs.device) == "emu:1"
    assert all(mine is other for mine, other in zip(model.parameters(), parameters, strict=True))
    assert {str(parameter.grad) for parameter in model.parameters()} == {"None"}


def test_a_model_larger_than_each_device_trains(accelerator):
    """It is moved stage by stage, so that it never lies on one device as a whole."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    size = sum(parameter.nbytes for parameter in build().parameters())
    inputs = torch.randn(4, 256)
    options = {"loss": F.mse_loss, "optimizer": sgd, "num_microbatches": 2}
    for device in range(2):
        accelerator.empty_cache()
        accelerator.set_memory_limit(accelerator.memory_allocated(device) + 3 * size // 4, device)
    with pytest.raises(torch.OutOfMemoryError):
        pipeline_of(build(), devices="emu:0", **options)
    accelerator.set_memory_limit(accelerator.memory_allocated(1) + 3 * size // 2, 1)
    accelerator.set_memory_limit(accelerator.memory_allocated(0) + 3 * size // 2, 0)
    with pipeline_of(build(), devices=["emu:0", "emu:1"], **options) as pipeline:
        assert pipeline.step(inputs, inputs).isfinite()


def test_a_device_without_memory_is_an_error_that_names_the_stage(accelerator):
    model = make_mlp()
    with pipeline_of(model, optimizer=sgd, devices=["emu:0", "emu:1"]) as pipeline:
        pipeline.step(*make_batch())
        accelerator.set_memory_limit(accelerator.memory_allocated(1), 1)
        with pytest.raises(StageError, match=r"stage 1, .*out of memory"):
            pipeline.step(*make_batch())


def waits_of(accelerator, batches, schedule="1f1b", **options):
    """How often the host waited for each of two devices in as many steps as there are batches, one
    by one and then in a loop; nothing may block but where a number is read."""
    with pipeline_of(
        make_mlp(dropout=0.0), schedule, optimizer=sgd, devices=["emu:0", "emu:1"], **options
    ) as pipeline:
        pipeline.step(*batches[0])  # layers are looked at in their first run
        for device in range(4):
            accelerator.reset_host_counts(device)
        accelerator.set_sync_debug_mode("default" if options else "error")
        losses = [pipeline.step(*batch) for batch in batches]
        losses += pipeline.steps(batches)
        accelerator.set_sync_debug_mode("default")
        waits = [
            accelerator.host_reads(device) + accelerator.host_waits(device) for device in range(4)
        ]
    assert waits[2:] == [0, 0]
    assert torch.stack(on_cpu(losses)).isfinite().all()
    return waits[:2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_no_step_waits_for_a_device(accelerator, schedule):
    """Not even for the loss, until somebody reads it."""
    batches = [make_batch(seed=seed) for seed in range(4)]
    assert waits_of(accelerator, batches, schedule) == [0, 0]


@pytest.mark.parametrize(
    ("clip_norm", "scales", "post_validate", "num_waits"),
    [
        (0.05, False, False, 0),
        (1e6, False, False, 0),
        (None, True, False, 1),
        (0.05, True, False, 1),
        (1e6, False, True, 1),
        (1e6, True, True, 1),
    ],
)
def test_a_rank_reads_at_most_one_number_per_step(
    accelerator, clip_norm, scales, post_validate, num_waits
):
    """To clip, none; to skip a step, or to take it back, one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scales else None
    batches = [make_batch(seed=seed) for seed in range(4)]
    options = {"clip_norm": clip_norm, "grad_scaler": scaler, "post_validate": post_validate}
    assert waits_of(accelerator, batches, **options) == [num_waits * 8] * 2


def spans_of(accelerator, schedule, launch_seconds):
    """Of each of two devices, the stream that computes in a step, where a kernel takes a second and
    its launch takes the host so long; and no host ever waits for a device."""
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(16))), torch.randn(16, 16)
    options = {"optimizer": sgd, "loss": F.mse_loss, "num_microbatches": 8}
    with pipeline_of(model, schedule, devices=["emu:0", "emu:1"], **options) as pipeline:
        pipeline.step(batch, batch)  # layers are looked at in their first run
        for device in range(2):
            accelerator.reset_host_counts(device)
        accelerator.set_pace(launch_seconds, 1.0)
        pipeline.step(batch, batch)
        spans = [max(accelerator.worked(device), key=lambda s: s.busy) for device in range(2)]
        accelerator.set_pace(0.0, 0.0)
        assert [accelerator.host_waits(i) + accelerator.host_reads(i) for i in range(2)] == [0, 0]
    return spans


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_launches_that_take_half_as_long_as_kernels_leave_no_device_idle(accelerator, schedule):
    """Hosts are ahead: the last stage has no gap between its first kernel and its last one, and the
    first one no other than the schedule's."""
    at_once = spans_of(accelerator, schedule, launch_seconds=1e-9)
    launched = spans_of(accelerator, schedule, launch_seconds=0.5)
    for span, theirs in zip(launched, at_once, strict=True):
        assert span.busy == theirs.busy > 200
        assert span.end - span.begin == pytest.approx(theirs.end - theirs.begin, abs=1.0)
    assert launched[-1].end - launched[-1].begin == pytest.approx(launched[-1].busy, abs=1.0)
    slow = spans_of(accelerator, schedule, launch_seconds=2.0)
    assert slow[-1].end - slow[-1].begin > 1.5 * slow[-1].busy  # nobody is ahead any more


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_overflow_skips_the_step_on_all_devices(accelerator, clip_norm):
    """The host reads one number for that, too."""
    found = []
    for devices in ("cpu", ["emu:0", "emu:1"]):
        model, reads = make_mlp(dropout=0.0), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-100)
        options = {"clip_norm": clip_norm, "grad_scaler": scaler, "devices": devices}
        with pipeline_of(model, optimizer=adamw, **options) as pipeline:
            for step in range(3):
                for device in range(2):
                    accelerator.reset_host_counts(device)
                inputs, targets = make_batch(seed=step)
                pipeline.step(inputs * 100, targets)
                reads.append([accelerator.host_reads(device) for device in range(2)])
        found.append((model, scaler.get_scale(), reads))
    (theirs, expected, _), (ours, scale, reads) = found
    assert scale == expected < 2.0**30  # the first step was skipped
    assert reads == [[1, 1]] * 3
    assert_same(ours, theirs)


@pytest.mark.parametrize("how", ["step", "steps"])
def test_a_timeline_shows_when_devices_worked(monkeypatch, how):
    later = Stamps.seconds

    def an_hour_late(self):
        starts, ends = later(self)
        if str(self._clock._stream.device) == "emu:1":
            starts, ends = (type(times)("d", [t + 3600 for t in times]) for times in (starts, ends))
        return starts, ends

    monkeypatch.setattr(Stamps, "seconds", an_hour_late)
    with pipeline_of(make_mlp(), optimizer=sgd, devices=["emu:0", "emu:1"]) as pipeline:
        batches = [make_batch(seed=seed) for seed in range(3)]
        if how == "steps":
            list(pipeline.steps(batches))
        else:
            pipeline.step(*batches[0])
        spans = pipeline.timeline.spans
    for rank, shift in enumerate([0, 3600]):
        times = [time for span in spans if span.rank == rank for time in (span.start, span.end)]
        assert times == sorted(times)
        assert shift - 60 < times[0] < times[-1] < shift + 60


def test_what_the_caller_does_between_steps_comes_in_between(accelerator):
    """On the caller's own streams: weights are changed, losses and outputs used, data made."""

    def run(devices):
        model = make_mlp(dropout=0.0)
        first = torch.device("cpu" if devices == "cpu" else devices[0])
        side = None if devices == "cpu" else torch.Stream(first)
        results = []
        with pipeline_of(model, optimizer=adamw, devices=devices) as pipeline:
            for step in range(3):
                inputs, targets = make_batch(seed=step)
                made = inputs.to(first) * 2
                results.append(pipeline.step(made, targets) + step)
                del made
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
                results.append(pipeline.evaluate(inputs).sum() * 2)
                results.append(sum(weight.detach().sum().cpu() for weight in model.parameters()))
            for loss in pipeline.steps(make_batch(seed=seed) for seed in range(5)):
                results.append(loss * 3)
                del loss
        assert side is None or side.device == first
        return torch.stack(on_cpu(results))

    assert torch.equal(run(["emu:0", "emu:1"]), run("cpu"))


def test_a_step_that_fails_leaves_devices_in_order(accelerator):
    class Failing(nn.Module):
        fails = False

        def forward(self, value):
            if self.fails:
                raise ValueError("boom")
            return value

    torch.manual_seed(0)
    failing = Failing()
    ours = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8), failing, nn.Linear(8, 4))
    theirs = copy.deepcopy(ours)
    with pipeline_of(ours, optimizer=sgd, devices=["emu:0", "emu:1"]) as pipeline:
        pipeline.step(*make_batch(seed=0))
        failing.fails = True
        with pytest.raises(StageError, match="boom"):
            pipeline.step(*make_batch(seed=1))
        failing.fails = False
        losses = [pipeline.step(*make_batch(seed=1)).cpu()]
    with pipeline_of(theirs, optimizer=sgd) as pipeline:
        pipeline.step(*make_batch(seed=0))
        assert [pipeline.step(*make_batch(seed=1))] == losses
    assert_same(ours, theirs)


def test_plans_for_accelerators_take_those_of_this_process_in_their_order():
    model = make_mlp()
    kinds = ("gpu", "cpu", "gpu")
    plan = make_plan(model, 3, 4)
    named = tuple(pk.Device(name=f"d{rank}", kind=kind) for rank, kind in enumerate(kinds))
    with pk.Pipeline(
        model, replace(plan, devices=named), loss=F.cross_entropy, optimizer=sgd, seed=3
    ) as pipeline:
        pipeline.step(*make_batch())
        places = [
            str(next(iter(stage.state_dict().values())).device)
            for stage in pipeline.stages.values()
        ]
    assert places == ["emu:0", "cpu", "emu:1"]


def test_a_cluster_has_the_devices_that_ranks_may_compute_on(accelerator):
    """Also those that only this process has told torch of."""
    cluster = pk.Cluster.local(kind="gpu")
    assert len(cluster.devices) == len(accelerators()) == accelerator.device_count()
    assert {device.memory_bytes for device in cluster.devices} == {accelerator.mem_get_info(0)[1]}


@pytest.mark.parametrize("policy", [versions.Flush(), versions.Stash()], ids=str)
def test_a_plan_for_accelerators_is_proven_there(accelerator, policy):
    plan = streams.plan_for(policy, 3, microbatches=4, model=make_mlp())
    places = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(3))
    accelerator.reset_peak_memory_stats(2)
    proof = prove(workload(), replace(plan, devices=places))
    assert proof.equal and proof.exact
    assert accelerator.max_memory_allocated(2)


def test_weights_that_layers_share_take_as_much_as_planned(accelerator):
    """A head that is tied to the embedding is most of what there is, and counted once a stage."""
    torch.manual_seed(0)
    model = gpt.GPT(vocabulary=8192, width=64, heads=2, layers=2, context=8)
    model.head.logits.weight = model.embedding.tokens.weight
    batch = torch.randint(0, 8192, (2, 4, 8)).unbind()
    options = {"loss": gpt.loss, "optimizer": adamw}
    graph = pk.profile(model, batch[0], targets=batch[1], repeats=1, ranks=0, **options)
    for stages in (1, 2):
        cluster = pk.Cluster.local(stages)
        plan = pk.plan(graph, cluster, microbatches=2, schedule="1f1b", stages=stages)
        gc.collect()  # what tests before this one have left
        before = [accelerator.memory_allocated(rank) for rank in range(stages)]
        devices = [f"emu:{rank}" for rank in range(stages)]
        with pk.Pipeline(copy.deepcopy(model), plan, devices=devices, **options) as pipeline:
            pipeline.step(*batch)  # behind which there are no gradients
            taken = [accelerator.memory_allocated(rank) for rank in range(stages)]
        for parts, now, then in zip(plan.memory_parts, taken, before, strict=True):
            assert now - then == pytest.approx(parts.weights + parts.optimizer, rel=0.01)
            assert parts.gradients == parts.weights


def test_a_plan_is_proven_there_for_weights_that_layers_share():
    """The reference shares them, too, though ``Module.to`` would make copies."""

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    tied = Workload(
        build_model=TiedGPT,
        loss=loss,
        optimizer=adamw,
        batches=lambda: (token_batch(8, seed=step) for step in itertools.count()),
    )
    plan = make_plan(TiedGPT(), 2, 4)
    places = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(2))
    proof = prove(tied, replace(plan, devices=places), num_steps=3)
    assert proof.equal


def test_parameters_that_move_keep_hooks_marks_and_optimizers(accelerator):
    """What the user has put there before the pipeline was built."""

    def run(devices):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), Recurrent(8), nn.Linear(8, 4))
        seen = []
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        model[2].bias.register_post_accumulate_grad_hook(lambda one: seen.append(one is bias))
        model[2].bias.mark, bias = "kept", model[2].bias
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        with pipeline_of(model, cuts=[2], optimizer=sgd, devices=devices) as pipeline:
            loss = pipeline.step(*make_batch())
        given.step()  # holds the same objects, whose gradients are there
        assert model[2].bias is bias and bias.mark == "kept" and seen and all(seen)
        return model, loss.cpu()

    (ours, loss), (theirs, expected) = run(["emu:2", "emu:1"]), run("cpu")
    assert torch.equal(loss, expected)
    assert_same(ours, theirs)


def test_a_model_that_is_elsewhere_than_its_ranks_is_refused():
    with pytest.raises(InputError, match=r"'0.weight' is on emu:1, .* say where, as in devices="):
        pipeline_of(make_mlp().to("emu:1"))
    pipeline_of(make_mlp().to("emu:1"), devices="emu:2").close()


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["emu:0"], "devices: 1 devices for a plan of 2 ranks; give one per rank"),
        (["emu:0", "emu:9"], r"devices: 'emu:9' is not here; there are: emu:0, .*emu:3"),
        ("cuda:0", r"devices: 'cuda:0' is not here"),
        (["emu:0", "nowhere"], r"devices: 'nowhere' is no device of torch"),
        (["emu:0", 7], r"devices: 'emu:7' is not here"),
        (3, r"devices: 3 for a plan of 2 ranks"),
        (["emu:0", None], r"devices: None is no device of torch"),
    ],
)
def test_devices_that_are_not_there_are_refused(devices, message):
    with pytest.raises(InputError, match=message):
        pipeline_of(make_mlp(), devices=devices)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_padding_mask_is_trained_on_no_device(recompute):
    trained = []
    for devices in ("cpu", ["emu:0", "emu:2"]):
        model = masked_encoder()
        options = {"optimizer": sgd, "devices": devices, "recompute": recompute}
        with pipeline_of(model, "1f1b", 2, **options) as pipeline:
            losses = [pipeline.step(*masked_batch(seed=step)).cpu() for step in range(2)]
        seen = [set(layer.seen) for layer in model[:-1]]
        assert seen == [{(False, False)}, *[{(True, False)}] * 3]
        trained.append((torch.stack(losses), model))
    assert torch.equal(trained[0][0], trained[1][0])
    assert_same(trained[0][1], trained[1][1])
