"""A run that was saved and goes on, in whatever layout, is the run that never stopped."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import penstock as pk
from penstock import versions
from penstock.base.errors import FileError, InputError
from penstock.training.checkpoint.contents import Contents
from penstock.training.checkpoint.folder import Checkpoint, checkpoint_in, folder_name
from tests.kit.examples import more
from tests.kit.helpers import make_plan
from tests.kit.streams import batches as stream_batches
from tests.kit.streams import layered_model, plan_for
from tests.kit.training import adamw, momentum
from tests.numerics.test_asynchronous import POLICIES

STEPS, HALF = 6, 3


class Tied(nn.Module):
    """An embedding that is also the head, dropout, batch norm and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.norm = Rows()
        self.dropout = nn.Dropout(0.2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layer = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def spine(self):
        return [
            *(self.embedding, self.norm, self.dropout, self.frozen),
            *(self.layer, self.last, self.head),
        ]


def in_double():
    return Tied().double()


class Rows(nn.BatchNorm1d):
    """Batch norm of (rows, length, width)."""

    def __init__(self):
        super().__init__(8)

    def forward(self, value):
        return super().forward(value.flatten(0, 1)).view_as(value)


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (8, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


LAYOUTS = {
    "one rank": {"num_ranks": 1, "num_microbatches": 4},
    "1f1b on 2": {"num_ranks": 2, "num_microbatches": 4},
    "1f1b on 2, cut late": {"num_ranks": 2, "num_microbatches": 4, "cuts": [5]},
    "gpipe on 3": {"num_ranks": 3, "num_microbatches": 4, "schedule": "gpipe"},
    "interleaved on 2": {"num_ranks": 2, "num_microbatches": 4, "schedule": "interleaved-1f1b"},
    "zb-v on 2": {"num_ranks": 2, "num_microbatches": 4, "schedule": "zb-v"},
}


def pipeline_in(layout, model, **options):
    plan = make_plan(model, **LAYOUTS[layout])
    options = {"loss": loss_of, "optimizer": adamw, "seed": 3, **options}
    return pk.Pipeline(model, plan, deadline_seconds=300, **options)


def trained(layout, first, stop, *, load=None, save=None, build=Tied, **options):
    """The losses of some steps, from a checkpoint or not, with a checkpoint at the end or not."""
    # The seed of the checkpoint counts, and nothing is left of the weights that were there.
    seed = 3 if load is None else 4
    model = build()
    if load is not None:
        model.apply(lambda part: [nn.init.ones_(own) for own in part.parameters(recurse=False)])
    with pipeline_in(layout, model, seed=seed, **options) as pipeline:
        if load is not None:
            assert pipeline.load(load) == first
        losses = [pipeline.step(*batch(step)) for step in range(first, stop)]
        if save is not None:
            pipeline.save(save)
    return torch.stack(losses)


def assert_same_training(folder, other, step=STEPS, tolerance=0.0):
    """Two checkpoints hold the same weights, buffers, optimizer state and options."""
    ours, theirs = (Contents(Checkpoint.opened(run / folder_name(step))) for run in (folder, other))
    assert set(ours.checkpoint.pieces_with) == set(theirs.checkpoint.pieces_with)
    for name in ours.checkpoint.pieces_with:
        torch.testing.assert_close(
            ours.tensor(name), theirs.tensor(name), rtol=tolerance, atol=tolerance
        )
    assert ours.trainer_of.keys() == theirs.trainer_of.keys()
    for name, told in ours.trainer_of.items():
        assert told.options[name] == theirs.trainer_of[name].options[name]
        assert told.kind == theirs.trainer_of[name].kind
        assert ours.plain_state(name) == theirs.plain_state(name)


def run_to(stop, make_folder):
    """Trains up to a step, once for each layout and whatever else a pipeline is given; gives the
    losses and the folder with a checkpoint of the end."""

    @cache
    def run(layout="1f1b on 2", **options):
        folder = make_folder("run")
        return trained(layout, 0, stop, save=folder, **options), folder

    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_to(STEPS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return run_to(HALF, tmp_path_factory.mktemp)


def goes_on(uninterrupted, half, folder, before, after, tolerance=0.0, **options):
    """Train half of the steps in one layout and the rest in another."""
    expected, whole = uninterrupted(**options)
    first, saved = half(before, **options)
    rest = trained(after, HALF, STEPS, load=saved, save=folder, **options)
    losses = torch.cat([first, rest])
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert_same_training(folder, whole, tolerance=tolerance)


FEW = ("1f1b on 2", "1f1b on 2, cut late")


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", [FEW[0], *(more(one) for one in LAYOUTS if one not in FEW)])
def test_any_layout_goes_on_from_any_other(before, after, uninterrupted, half, tmp_path):
    # Where one rank has both ends of the tied weights, it adds their gradients in another order.
    tied_alike = not {"one rank", "zb-v on 2"} & {before, after}
    tolerance = 0.0 if tied_alike else 1e-12
    goes_on(uninterrupted, half, tmp_path, before, after, tolerance, build=in_double)


def in_groups(parameters):
    """Without decay for vectors, as is usual."""
    named = list(parameters.named())
    matrices = [parameter for _, parameter in named if parameter.dim() > 1]
    others = [parameter for _, parameter in named if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99))


OPTIMIZERS = {
    "momentum": momentum,
    "adamw in groups": in_groups,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    "rotated adam": lambda parameters: pk.optimizers.RotatedAdam(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_optimizers(optimizer, uninterrupted, half, tmp_path):
    goes_on(uninterrupted, half, tmp_path, *FEW, optimizer=OPTIMIZERS[optimizer])


SCHEDULERS = {
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [2],
    ),
}


class Halving:
    """torch saves what such an object remembers."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.9**self.calls


def test_functions_of_schedulers_that_remember_go_on_remembering(uninterrupted, half, tmp_path):
    def scheduler(optimizer):
        return lr_scheduler.LambdaLR(optimizer, Halving())

    goes_on(uninterrupted, half, tmp_path, *FEW, lr_scheduler=scheduler)


class Remembering(nn.Linear):
    """Keeps a tensor beside its parameters, as modules with statistics of their own do."""

    seen = torch.zeros(2)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_what_modules_keep_besides_is_loaded(tmp_path):
    def build():
        model = Tied()
        model.last = Remembering(8, 8)
        return model

    model, other = build(), build()
    model.last.seen = torch.tensor([1.0, 2.0, 3.0])
    for net, action in ((model, "save"), (other, "load")):
        with pipeline_in("1f1b on 2", net) as pipeline:
            getattr(pipeline, action)(tmp_path)
    assert torch.equal(other.last.seen, model.last.seen)


REFUSED = {
    "a scheduler too few": (
        {"lr_scheduler": SCHEDULERS["lambda"]},
        {},
        "it has a learning-rate scheduler, and this pipeline has none",
    ),
    "a scheduler too many": (
        {},
        {"lr_scheduler": SCHEDULERS["lambda"]},
        "this pipeline has a learning-rate scheduler, and it has none",
    ),
    "another scheduler": (
        {"lr_scheduler": SCHEDULERS["lambda"]},
        {"lr_scheduler": SCHEDULERS["one cycle"]},
        "another kind of scheduler",
    ),
    "another number of schedulers": (
        {"lr_scheduler": SCHEDULERS["sequence"]},
        {
            "lr_scheduler": lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.ConstantLR(optimizer) for _ in range(3)],
                [2, 4],
            )
        },
        "has 2 schedulers in it, and this pipeline's has 3",
    ),
    "a scaler too few": (
        {"grad_scaler": torch.amp.GradScaler("cpu")},
        {},
        "it has a grad_scaler, and this pipeline has none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_go_on_otherwise_is_refused(case, tmp_path):
    before, after, told = REFUSED[case]
    trained("1f1b on 2", 0, 1, save=tmp_path, **before)
    with (
        pipeline_in("1f1b on 2", Tied(), **after) as pipeline,
        pytest.raises(InputError, match=told),
    ):
        pipeline.load(tmp_path)


def test_weights_that_were_trained_apart_are_not_tied_in_silence(tmp_path):
    def apart():
        model = Tied()
        model.head.weight = nn.Parameter(model.head.weight.clone())
        return model

    trained("1f1b on 2", 0, 1, save=tmp_path, build=apart)
    with (
        pipeline_in("1f1b on 2", Tied()) as pipeline,
        pytest.raises(FileError, match=r"has trained 'head\.weight' for itself"),
    ):
        pipeline.load(tmp_path)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_state_of_schedulers(scheduler, uninterrupted, half, tmp_path):
    options = {"optimizer": in_groups, "lr_scheduler": SCHEDULERS[scheduler]}
    goes_on(uninterrupted, half, tmp_path, *FEW, **options)


def test_clipping_depends_on_nothing_else(uninterrupted, half, tmp_path):
    goes_on(uninterrupted, half, tmp_path, *FEW, clip_norm=0.1)


def test_the_loss_scale_goes_on(tmp_path):
    def scaled(first, stop, **how):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = trained("1f1b on 2", first, stop, grad_scaler=scaler, **how)
        return losses, scaler.state_dict()

    expected, scale = scaled(0, STEPS)
    first, _ = scaled(0, HALF, save=tmp_path)
    rest, scale_again = scaled(HALF, STEPS, load=tmp_path)
    assert torch.equal(torch.cat([first, rest]), expected)
    assert scale_again == scale
    assert [*map(type, scale_again.values())] == [*map(type, scale.values())]
    assert scale["scale"] > 2.0**10


@pytest.mark.parametrize("post_validate", [False, True])
def test_the_loss_scale_in_the_course_of_a_loop(post_validate, tmp_path):
    """It is that of the step behind which is saved; the user's scaler follows at the end."""

    def pipeline_with(scaler):
        return pipeline_in(
            "1f1b on 2", Tied(), grad_scaler=scaler, post_validate=post_validate, clip_norm=1.0
        )

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    data = [batch(step) for step in range(STEPS)]
    with pipeline_with(scaler) as pipeline:
        losses = [*pipeline.steps(data, checkpoints=pk.Checkpoints(tmp_path, every=1))]
    for step in range(1, STEPS + 1):
        state = Checkpoint.opened(tmp_path / folder_name(step)).identity.scaler
        assert (state["scale"], state["_growth_tracker"]) == (2.0 ** (8 + step // 2), step % 2)
    again = torch.amp.GradScaler("cpu")
    with pipeline_with(again) as pipeline:
        assert pipeline.load(tmp_path / folder_name(HALF)) == HALF
        rest = [*pipeline.steps(data[HALF:])]
    assert torch.equal(torch.stack(rest), torch.stack(losses[HALF:]))
    assert again.state_dict() == scaler.state_dict()


FEW_POLICIES = ("stash", "2bw", "pipemare", "spectrain")
ASYNCHRONOUS = [
    name if name in FEW_POLICIES else more(name) for name in POLICIES if name != "flush"
]


@pytest.mark.parametrize("policy", ASYNCHRONOUS)
def test_asynchronous_runs_go_on_as_if_they_had_only_drained(policy, tmp_path):
    data = stream_batches([8] * 4)

    def run(folder, first, stop, load=None):
        plan = plan_for(POLICIES[policy], 3, microbatches=4)
        model = layered_model()
        with pk.Pipeline(
            model, plan, loss=F.mse_loss, optimizer=momentum, seed=first + 3, deadline_seconds=300
        ) as pipeline:
            if load is not None:
                assert pipeline.load(load) == first
            losses = [*pipeline.steps(data[first:2])] if first < 2 else []
            losses += pipeline.steps(data[max(first, 2) : stop])
            pipeline.save(folder)
        return losses

    expected = run(tmp_path / "whole", 0, 4)
    first = run(tmp_path / "half", 0, 2)
    rest = run(tmp_path / "rest", 2, 4, load=tmp_path / "half")
    assert torch.equal(torch.stack(first + rest), torch.stack(expected))
    assert_same_training(tmp_path / "rest", tmp_path / "whole", step=4)


@pytest.mark.parametrize("policy", ["flush", "stash", "2bw", "pipemare"])
def test_a_loop_that_is_left_where_it_saves_has_saved(policy, tmp_path):
    data = stream_batches([8] * 4)
    plan = plan_for(POLICIES[policy], 3, microbatches=4)
    options = {"loss": F.mse_loss, "optimizer": momentum, "deadline_seconds": 300}
    with pk.Pipeline(layered_model(), plan, **options) as pipeline:
        for step, _ in enumerate(pipeline.steps(data, checkpoints=pk.Checkpoints(tmp_path, 2))):
            if step == 1:
                break
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(2)]


@pytest.mark.parametrize("policy", ["flush", "stash", "2bw", "pipemare"])
def test_a_loop_that_saves_is_a_loop_that_drains_there(policy, tmp_path):
    """And one that is resumed between two checkpoints saves at the same steps."""
    data = stream_batches([8] * 7)

    def pipeline():
        return pk.Pipeline(
            layered_model(),
            plan_for(POLICIES[policy], 3, microbatches=4),
            loss=F.mse_loss,
            optimizer=momentum,
            seed=3,
            deadline_seconds=300,
        )

    with pipeline() as drained:
        expected = [
            loss for part in (data[:3], data[3:6], data[6:]) for loss in drained.steps(part)
        ]
        drained.save(tmp_path / "drained")
    wanted = pk.Checkpoints(tmp_path / "run", every=3)
    with pipeline() as saving:
        losses = [*saving.steps(iter(data[:4]), checkpoints=wanted)]
    with pipeline() as resumed:
        position = resumed.load(tmp_path / "run")
        assert position == 3
        again = [*resumed.steps(data[position:], checkpoints=wanted)]
        resumed.save(tmp_path / "run")
    assert torch.equal(torch.stack(losses), torch.stack(expected[:4]))
    assert torch.equal(torch.stack(again), torch.stack(expected[3:]))
    assert_same_training(tmp_path / "run", tmp_path / "drained", step=7)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        folder_name(step) for step in (3, 6, 7)
    ]


@pytest.mark.parametrize("policy", ASYNCHRONOUS)
def test_a_stream_that_saves_and_goes_on_saves_what_it_would_hold_if_it_had_drained(
    policy, tmp_path
):
    data = stream_batches([8] * 7)

    def pipeline():
        model = layered_model()
        for layer in model:
            layer[1] = nn.BatchNorm1d(6).double()  # buffers that every forward changes
        plan = plan_for(POLICIES[policy], 3, microbatches=4, model=model)
        schedule = lr_scheduler.ExponentialLR
        return pk.Pipeline(
            model, plan, loss=F.mse_loss, optimizer=momentum, seed=3, deadline_seconds=300,
            lr_scheduler=lambda optimizer: schedule(optimizer, 0.9),
        )  # fmt: skip

    with pipeline() as undisturbed:
        expected = [*undisturbed.steps(data)]
    wanted = pk.Checkpoints(tmp_path / "going on", every=2, drain=False)
    with pipeline() as going_on:
        losses = [*going_on.steps(data, checkpoints=wanted)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for step in (2, 6):
        with pipeline() as drained:
            list(drained.steps(data[:step]))
            drained.save(tmp_path / str(step))
            rest = [*drained.steps(data[step:])]
        assert_same_training(tmp_path / "going on", tmp_path / str(step), step)
        with pipeline() as resumed:  # from where others go on: as who drained, not as who did not
            assert resumed.load(tmp_path / "going on" / folder_name(step)) == step
            assert torch.equal(torch.stack([*resumed.steps(data[step:])]), torch.stack(rest))


@pytest.mark.parametrize("replicas", ["2-1", "1-2"])
def test_copies_of_a_stage_go_on_together(replicas, tmp_path):
    """From a stage on one rank to the same on two, and back."""
    data = stream_batches([8] * 4)

    def run(replicas, first, stop, folder, load=None):
        plan = plan_for(versions.Flush(), 2, microbatches=4, replicas=replicas)
        with pk.Pipeline(
            layered_model(), plan, loss=F.mse_loss, optimizer=adamw, seed=3, deadline_seconds=300
        ) as pipeline:
            if load is not None:
                pipeline.load(load)
            losses = [pipeline.step(*data[step]) for step in range(first, stop)]
            pipeline.save(folder)
        return losses

    expected = run(replicas, 0, 4, tmp_path / "whole")
    first = run(replicas, 0, 2, tmp_path / "half")
    rest = run(replicas, 2, 4, tmp_path / "rest", load=tmp_path / "half")
    assert torch.equal(torch.stack(first + rest), torch.stack(expected))
    assert_same_training(tmp_path / "rest", tmp_path / "whole", step=4)
    alone = run("1-1", 2, 4, tmp_path / "alone", load=tmp_path / "half")
    torch.testing.assert_close(alone, rest, rtol=1e-12, atol=1e-12)
    assert_same_training(tmp_path / "alone", tmp_path / "whole", step=4, tolerance=1e-12)


def test_rates_are_those_of_the_layout(tmp_path):
    """Where replicas average gradients there are fewer updates, each of so many times the rate."""
    saved = {}
    for replicas in ("2-1", "1-1", "2-1"):
        plan = plan_for(versions.Stash(), 2, microbatches=4, replicas=replicas)
        with pk.Pipeline(
            layered_model(), plan, loss=F.mse_loss, optimizer=momentum, deadline_seconds=300
        ) as pipeline:
            if saved:
                pipeline.load(tmp_path)
            list(pipeline.steps(stream_batches([8])))
            pipeline.save(tmp_path)
        (told,) = {
            tuple(sorted({options["lr"] for options in piece.header.optimizing.options.values()}))
            for piece in checkpoint_in(tmp_path).pieces
            if piece.header.stage == 0
        }
        saved.setdefault(replicas, []).append(told)
    assert saved == {"2-1": [(0.2,), (0.2,)], "1-1": [(0.1,)]}


def test_a_script_without_penstock_loads_the_weights(tmp_path):
    from safetensors.torch import load_file

    trained("gpipe on 3", 0, 2, save=tmp_path)
    model = Tied()
    with pipeline_in("one rank", model) as pipeline:
        pipeline.load(tmp_path)
    state = {}
    for path in sorted((tmp_path / folder_name(2)).glob("*.safetensors")):
        state |= {key: value for key, value in load_file(path).items() if "/" not in key}
    other = Tied()
    other.load_state_dict(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])


def test_weights_alone_begin_anew(tmp_path):
    trained("1f1b on 2", 0, 2, save=tmp_path)
    with pipeline_in("one rank", Tied(), optimizer=momentum) as pipeline:
        with pytest.raises(InputError, match=r"was trained with AdamW.*SGD.*weights_only"):
            pipeline.load(tmp_path)
        assert pipeline.load(tmp_path, weights_only=True) == 0
        again = pipeline.step(*batch(0))
    model = Tied()
    with pipeline_in("one rank", model) as pipeline:
        pipeline.load(tmp_path)
    with pipeline_in("1f1b on 2", model) as pipeline:
        assert torch.equal(pipeline.step(*batch(0)), again)


def test_gradients_that_wait_for_their_update_are_not_lost_in_silence(tmp_path):
    with pipeline_in("1f1b on 2", Tied()) as pipeline:
        pipeline.step(*batch(0), update=False)
        with pytest.raises(InputError, match="wait for their update"):
            pipeline.save(tmp_path)
        pipeline.step(*batch(1))
        pipeline.save(tmp_path)
        assert pipeline.load(tmp_path) == 2
        pipeline.step(*batch(2), update=False)
        list(pipeline.steps([batch(3)]))
        pipeline.save(tmp_path)
        assert pipeline.load(tmp_path) == 4


def test_an_optimizer_that_was_not_trained_has_no_state_to_load(tmp_path):
    with pipeline_in("1f1b on 2", Tied()) as pipeline:
        pipeline.save(tmp_path)
    expected = trained("1f1b on 2", 0, 2)
    assert torch.equal(trained("gpipe on 3", 0, 2, load=tmp_path), expected)


def test_another_model_is_refused_by_name(tmp_path):
    trained("1f1b on 2", 0, 1, save=tmp_path)

    class Other(Tied):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 8, bias=False)

    with (
        pipeline_in("1f1b on 2", Other()) as pipeline,
        pytest.raises(FileError, match=r"another model: it has, beside the model's, 'last\.bias'"),
    ):
        pipeline.load(tmp_path)
    with (
        pipeline_in("1f1b on 2", Tied().double()) as pipeline,
        pytest.raises(FileError, match=r"as float32 of shape .* and the model as float64"),
    ):
        pipeline.load(tmp_path)
