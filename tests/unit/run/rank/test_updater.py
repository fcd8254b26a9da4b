"""One rank's updates, alone: what is checked, what is undone, what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import InputError
from penstock.engine.run.rank.on_trust import UpdatesOnTrust
from penstock.engine.run.rank.protocols import FlushedUpdates, StreamedUpdates, UpdateProtocols
from penstock.engine.run.rank.updater import StageParameters, Updater
from penstock.engine.run.rank.worker import NUMBERS_PER_RUN
from penstock.engine.run.recipe import LossScale, Recipe
from penstock.engine.transport import ThreadExchange
from penstock.engine.transport.base import FIRST_EXCHANGE


def updater_of(stages, **options):
    """An updater of a job with one rank, and its protocols."""
    (transport,) = ThreadExchange(1, 5.0).transports
    places = iter(range(100))
    holdings = {
        stage: StageParameters(
            {f"{stage}.{name}": one for name, one in module.named_parameters()},
            {next(places): one for one in module.parameters()},
        )
        for stage, module in stages.items()
    }
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5), **options}
    updater = Updater(0, 1, holdings, transport, Recipe(**options))
    kind = UpdatesOnTrust if updater.recipe.post_validate else FlushedUpdates
    return updater, UpdateProtocols(kind(updater), StreamedUpdates(updater))


def two_layers():
    torch.manual_seed(0)
    return {0: nn.Linear(2, 2), 3: nn.Linear(2, 1)}


def fill_gradients(stages, value):
    for module in stages.values():
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)


def weights(stages):
    return torch.cat([p.detach().flatten() for m in stages.values() for p in m.parameters()])


def test_each_stage_is_stepped_by_an_optimizer_of_its_own():
    stages = two_layers()
    updater, updates = updater_of({**stages, 5: nn.ReLU()})
    assert list(updater.optimizers) == [0, 3]
    before = stages[3].weight.detach().clone()
    updates.begin(1, asynchronous=False)
    fill_gradients(stages, 1.0)
    updates.now.update(3)
    assert torch.equal(stages[3].weight, before - 1.0)
    assert stages[3].weight.grad is None
    assert stages[0].weight.grad is not None
    updates.now.update(5)
    assert updater.num_updates == 1


@pytest.mark.parametrize("place", ["class", "object"])
def test_an_optimizer_that_clears_gradients_in_its_own_way_does(place):
    cleared = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            cleared.append(set_to_none)
            super().zero_grad(set_to_none)

    def made(parameters):
        if place == "class":
            return Own(parameters, lr=1.0)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        optimizer.zero_grad = Own.zero_grad.__get__(Own(parameters, lr=1.0))
        return optimizer

    stages = {0: nn.Linear(2, 2)}
    _, updates = updater_of(stages, optimizer=made)
    updates.begin(1, asynchronous=False)
    fill_gradients(stages, 1.0)
    updates.now.update(0)
    assert cleared == [True]
    assert stages[0].weight.grad is None


@pytest.mark.parametrize("made", [None, 3, []])
def test_what_makes_no_optimizer_is_refused(made):
    with pytest.raises(InputError, match="what the optimizer function made is of type"):
        updater_of(two_layers(), optimizer=lambda _: made)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"], []])
def test_only_a_stage_with_nothing_to_train_needs_no_optimizer(frozen):
    def refuses(parameters):
        raise ValueError("nothing that I could train")

    layer = nn.Linear(2, 2)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    if len(frozen) == 2:
        assert updater_of({0: layer}, optimizer=refuses)[0].optimizers == {}
        return
    with pytest.raises(InputError, match="nothing that I could train"):
        updater_of({0: layer}, optimizer=refuses)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad_step", [None, 0, 1])
def test_steps_on_trust_end_where_agreed_steps_end(clip_norm, scaled, bad_step):
    found = []
    scale = LossScale.of(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
    for post_validate in (False, True):
        stages = two_layers()
        updater, updates = updater_of(
            stages,
            clip_norm=clip_norm,
            loss_scale=scale if scaled else None,
            post_validate=post_validate,
        )
        stands = []
        for step in range(3):
            updates.begin(step, asynchronous=False)
            infinite = scaled and step == bad_step
            fill_gradients(stages, float("inf") if infinite else 1.0 + step)
            if not post_validate:
                updates.now.agree()
            updates.now.update(3)
            updates.now.update(0)
            assert updates.now.unvalidated == post_validate
            stands.append(updates.now.settle())
            assert not updates.now.unvalidated
        found.append((weights(stages), updater.norm, updater.loss_scale))
        if post_validate:
            assert stands == [
                clip_norm > 1 and not (scaled and step == bad_step) for step in range(3)
            ]
        else:
            assert all(stands)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("post_validate", [False, True])
def test_the_loss_scale_follows_the_verdicts(post_validate):
    stages = two_layers()
    scale = LossScale.of(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
    updater, updates = updater_of(stages, loss_scale=scale, post_validate=post_validate)
    scales = []
    for step, value in enumerate([1.0, 1.0, float("inf"), 1.0]):
        updates.begin(step, asynchronous=False)
        fill_gradients(stages, value)
        if not post_validate:
            updates.now.agree()
        for stage in (3, 0):
            updates.now.update(stage)
        updates.now.settle()
        scales.append(updater.loss_scale.scale)
    assert scales == [4.0, 8.0, 4.0, 4.0]


def test_what_is_undone_includes_momentum():
    stages = two_layers()
    updater, updates = updater_of(stages, clip_norm=0.1, post_validate=True)
    for step in range(2):
        updates.begin(step, asynchronous=False)
        fill_gradients(stages, 100.0)
        for stage in (3, 0):
            updates.now.update(stage)
        assert not updates.now.settle()
    (momentum, *_) = [
        state["momentum_buffer"] for state in updater.optimizers[0].state_dict()["state"].values()
    ]
    clipped = 0.1 / 9**0.5
    torch.testing.assert_close(momentum, torch.full_like(momentum, clipped * 1.5))


NUMBERS = [
    # (asynchronous, order of updates), numbers of the rounds that the sums are in before each
    ((False, [3, 0]), [0, 0]),
    ((True, [3, 0]), [0, 0]),
    ((True, [3, 0, 0, 3]), [0, 0, 1, 1]),
    ((True, [0, 3, 3, 0, 3, 0]), [0, 0, 1, 1, 2, 2]),
]


@pytest.mark.parametrize(("updates", "rounds"), NUMBERS)
def test_every_asynchronous_round_has_messages_of_its_own(updates, rounds):
    asynchronous, stages_in_order = updates
    stages = two_layers()
    updater, updates = updater_of(stages)
    for first in (NUMBERS_PER_RUN, 2 * NUMBERS_PER_RUN):
        updates.begin(first, asynchronous=asynchronous)
        numbers = []
        for stage in stages_in_order:
            fill_gradients(stages, 1.0)
            numbers.append(updater.sums.number)
            updates.now.update(stage)
        assert numbers == [FIRST_EXCHANGE + first + one for one in rounds]


class MasterSGD(torch.optim.Optimizer):
    """SGD with momentum on weights in float32, of which the parameters are roundings.

    Args:
        params: in any dtype.
        where: the masters are kept: in the ``"state"``, in an ``"attribute"`` that the first step
            makes, or in a ``"list"`` of objects that ``state_dict`` tells.
    """

    def __init__(self, params, where):
        super().__init__(params, {"lr": 0.5, "num_steps": 0})
        self.where = where
        self.kept = Kept()

    def masters(self):
        (group,) = self.param_groups
        if self.where == "state":
            return [self.state[p].setdefault("master", p.float()) for p in group["params"]]
        if self.where == "attribute":
            if not hasattr(self, "copies"):
                self.copies = [p.float() for p in group["params"]], 3
            return self.copies[0]
        self.kept.masters = self.kept.masters or [p.float() for p in group["params"]]
        return self.kept.masters

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["num_steps"] += 1
        for master, parameter in zip(self.masters(), group["params"], strict=True):
            before = self.state[parameter].get("momentum")
            momentum = parameter.grad.float() + (0 if before is None else 0.9 * before)
            self.state[parameter]["momentum"] = momentum
            parameter.copy_(master.sub_(momentum * (group["lr"] / group["num_steps"])))

    def state_dict(self):
        return {**super().state_dict(), "kept": self.kept.masters}

    def load_state_dict(self, state):
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.kept.masters = state["kept"]


class Kept:
    masters = None


@pytest.mark.parametrize("where", ["state", "attribute", "list"])
def test_what_is_undone_includes_weights_in_another_dtype(where):
    found = []
    for post_validate in (False, True):
        stages = {stage: layer.bfloat16() for stage, layer in two_layers().items()}
        updater, updates = updater_of(
            stages,
            clip_norm=0.1,
            post_validate=post_validate,
            optimizer=lambda parameters: MasterSGD(parameters, where),
        )
        for step in range(4):
            updates.begin(step, asynchronous=False)
            fill_gradients(stages, 1.0 + step)
            if not post_validate:
                updates.now.agree()
            for stage in (3, 0):
                updates.now.update(stage)
            assert updates.now.settle() != post_validate
        optimizer = updater.optimizers[0]
        found.append([weights(stages), *map(torch.clone, optimizer.masters())])
        assert optimizer.param_groups[0]["num_steps"] == 4
    assert all(map(torch.equal, *found))
    assert found[0][1].dtype == torch.float32


def test_an_optimizer_inside_another_is_undone_with_it():
    class Averaging(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=1.0)
            self.inner = MasterSGD(self.param_groups[0]["params"], "state")
            self.slow = [p.detach().clone() for p in parameters]
            self.itself = {"me": self}

        @torch.no_grad()
        def step(self, closure=None):
            self.inner.step()
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    found = []
    for post_validate in (False, True):
        stages = two_layers()
        options = {"clip_norm": 0.1, "post_validate": post_validate, "optimizer": Averaging}
        _, updates = updater_of(stages, **options)
        for step in range(3):
            updates.begin(step, asynchronous=False)
            fill_gradients(stages, 1.0 + step)
            if not post_validate:
                updates.now.agree()
            for stage in (3, 0):
                updates.now.update(stage)
            updates.now.settle()
        found.append(weights(stages))
    assert torch.equal(*found)


def test_dropping_gradients_drops_those_of_all_stages():
    stages = two_layers()
    updater, _ = updater_of(stages)
    fill_gradients(stages, 1.0)
    updater.drop_gradients()
    assert all(p.grad is None for module in stages.values() for p in module.parameters())
