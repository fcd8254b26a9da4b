"""Layers divided in every way that they can be train as whole ones; what cannot be is named."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, ModelError, StageError
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.groups import WORDS, make_net, net_batch, net_loss
from tests.kit.helpers import Lambda, make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12


def make_pictures():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),  # 0
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),  # 4
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 8),  # 8
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(8, 6),  # 11
        nn.LayerNorm(6),
        nn.Linear(6, 5),  # 13
    ).double()


def pictures(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(7, 3, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 5, (7,), generator=generator)


def in_order(*splits):
    return dict(zip(map(str, range(len(splits))), splits, strict=True))


PICTURES = {
    "one weird trick": in_order(
        *["data", "any", "any", "any", "data", "any", "any", "any"],
        *["column", "any", "any", "row", "data", "data"],
    ),
    "channels": in_order(
        *["column", "any", "any", "any", "row", "any", "any", "any"],
        *["row", "any", "any", "row", "any", "column"],
    ),
    "channels to channels": in_order(
        *["column", "any", "any", "any", "column", "any", "any", "any"],
        *["row", "any", "any", "column", "whole", "row"],
    ),
    "rows throughout": in_order(*["data"] * 14),
    "features said": in_order(
        *["column", "features", "features", "features", "row", "features", "any", "features"],
        *["row", "features", "features", "row", "any", "column"],
    ),
    "nothing said": {},
    "turned": in_order(
        *["data", "data", "any", "any", "row", "any", "data", "any"],
        *["row", "data", "any", "row", "any", "row"],
    ),
}


def trained(model, plan, batch, loss, **options):
    with pk.Pipeline(
        model, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS,
        **options,
    ) as pipeline:  # fmt: skip
        losses = [pipeline.step(*batch(seed)) for seed in range(2)]
        return torch.stack(losses), pipeline.evaluate(batch(5)[0])


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_convolutional_net_trains_as_on_one_device(name, size):
    ours, theirs = make_pictures(), make_pictures()
    plan = make_plan(ours, 1, 2).with_tensor_split(size, PICTURES[name])
    losses, outputs = trained(ours, plan, pictures, F.cross_entropy)
    one = SingleDevice(theirs, 2, F.cross_entropy, momentum, seed=3)
    assert same(losses, torch.stack([one.step(*pictures(seed)) for seed in range(2)]), TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)  # the statistics of batch norm, too
    assert same(outputs, theirs.eval()(pictures(5)[0]), TOLERANCE)


def make_words(padding=None):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, 6, padding), nn.Dropout(0.2), nn.Linear(6, WORDS)
    ).double()


@pytest.mark.parametrize("padding", [None, 9])
@pytest.mark.parametrize(
    "splits",
    [
        in_order("row", "any", "column"),
        in_order("row", "data", "row"),
        in_order("column", "any", "row"),
        in_order("column", "any", "column"),
        in_order("row", "any", "row"),
        in_order("data", "any", "column"),
        in_order("sequence", "any", "column"),
    ],
)
def test_embeddings_train_as_on_one_device(splits, padding):
    ours, theirs = make_words(padding), make_words(padding)
    plan = make_plan(ours, 1, 2).with_tensor_split(2, splits)
    batch = lambda seed: net_batch(5, seed)  # noqa: E731
    losses, _ = trained(ours, plan, batch, net_loss)
    one = SingleDevice(theirs, 2, net_loss, momentum, seed=3)
    assert same(losses, torch.stack([one.step(*batch(seed)) for seed in range(2)]), TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)


class Parametrised(nn.Linear):
    def forward(self, value):
        return super().forward(value) * 2


REFUSED = {
    "a class of its own": (
        lambda: nn.Sequential(Parametrised(4, 4)),
        {"0": "column"},
        "'0' (Parametrised) cannot be split as 'column': linear layers, embeddings and conv",
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2)),
        {"0": "column"},
        "'0' (Conv1d) cannot be split as 'column': it is grouped",
    ),
    "a weight that is computed": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        {"0": "row"},
        "cannot be split as 'row'",
    ),
    "an embedding that renormalises": (
        lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
        {"0": "row"},
        "it has max_norm; repeat it",
    ),
    "three pieces of ten": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 10))),
        {"0.0": "column/3"},
        "its 10 outputs are not 3 pieces",
    ),
    "a row that takes up what nobody divides": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))),
        {"0.2": "row"},
        """'0.2' is split as "row", so it takes up the part of the features""",
    ),
    "three pieces of a layer itself": (
        lambda: nn.Sequential(nn.Linear(4, 12)),
        {"0": "column/3"},
        "split modules inside a layer so",
    ),
    "tied and split differently": (
        make_net,
        {"embed.tokens": "row"},
        "'embed.tokens.weight' and 'head.logits.weight' are the same parameter, but splits let",
    ),
    "a skip by features": (
        make_net,
        {"down": "column"},
        "layer 'down' has skips, which pass whole",
    ),
    "features that are mixed": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Softmax(-1))),
        {"0": "column", "1": "features"},
        "layer '1' (Sequential) cannot be split as 'features': it does not treat every feature",
    ),
    "parameters of nobody knows which features": (
        lambda: nn.Sequential(nn.LayerNorm(4)),
        {"0": "features"},
        "'0' (LayerNorm) cannot be split as 'features': nobody knows which of its parameters",
    ),
    "heads of what has none": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        {"1": "heads"},
        "layer '1' (Dropout) is split as 'heads', which is for modules inside a layer",
    ),
    "nobody inside": (make_net, {"blocks.0.attention": "row"}, "means no layer and no module of"),
    "two patterns": (
        make_net,
        {"blocks.*.mlp.0": "column", "blocks.0.mlp.*": "row"},
        "splits say 'column' and 'row' of blocks.0.mlp.0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(what):
    build, splits, message = REFUSED[what]
    model = build()
    plan = make_plan(model, 1, 2).with_tensor_split(2, splits)
    with pytest.raises(ModelError) as caught:
        pk.Pipeline(model, plan, loss=net_loss, optimizer=momentum)
    assert message in str(caught.value)


class FourHeads(nn.Module):
    """Attention that counts its heads itself, as many do."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, value):
        heads = (one.unflatten(-1, (4, 3)) for one in self.qkv(value).chunk(3, -1))
        query, key, value = (one.transpose(1, 2) for one in heads)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


def test_code_that_fails_on_a_part_of_the_features_hears_of_the_split():
    """ "shape '[4, 3, 4, 3]' is invalid for input of size 72" named neither split nor layer."""
    model = nn.Sequential(FourHeads(), nn.Linear(12, 4))
    plan = make_plan(model, 1, 1).with_tensor_split(2, {"0.qkv": "column/3", "0.out": "row"})
    batch = torch.randn(4, 3, 12), torch.randn(4, 3, 4)
    with (
        pk.Pipeline(model, plan, loss=F.mse_loss, optimizer=momentum) as pipeline,
        pytest.raises(StageError, match=r"layer '0' does .*'0.qkv': 'column/3'.* take sizes from"),
    ):
        pipeline.step(*batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "without an optimizer, gradients would be parts"),
        ({"clip_norm": 1.0, "post_validate": True}, "others of the 2 tensor ranks would wait"),
    ],
)
def test_what_groups_cannot_do_is_refused_at_once(options, message):
    model = make_pictures()
    plan = make_plan(model, 1, 2).with_tensor_split(2, {})
    with pytest.raises(InputError, match=message):
        pk.Pipeline(model, plan, **{"loss": F.cross_entropy, "optimizer": momentum, **options})


@pytest.mark.parametrize("way", ["channels", "one weird trick"])
def test_statistics_of_minibatches_are_those_of_one_rank(way):
    """Members run copies of the same batch norms at the same time, which may share its hooks."""

    def trained(plan_for):
        model = make_pictures()
        with pk.Pipeline(
            model, plan_for(make_plan(model, 1, 2)), loss=F.cross_entropy, optimizer=momentum,
            batch_norm="minibatch", seed=3, deadline_seconds=DEADLINE_SECONDS,
        ) as pipeline:  # fmt: skip
            list(pipeline.steps(pictures(seed) for seed in range(3)))
        return model

    ours = trained(lambda plan: plan.with_tensor_split(2, PICTURES[way]))
    assert_same(ours, trained(lambda plan: plan), TOLERANCE)
    assert ours[1].num_batches_tracked == 3


class Inside(nn.Module):
    """Something between a column and its row that nobody has split."""

    def __init__(self, between):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(4, 8), between, nn.Linear(8, 4)

    def forward(self, value):
        return self.down(self.between(self.up(value)))


class Draws(nn.Module):
    def forward(self, value):
        return F.dropout(value, 0.5, self.training)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (nn.Dropout(0.5), "'0.between' drops out where each tensor rank has its part"),
        (nn.PReLU(), "'0.between' .* is called where each tensor rank has its part"),
        (Draws(), "layer '0' draws random numbers where each tensor rank has its part"),
    ],
)
def test_what_would_be_wrong_inside_a_region_is_refused_when_it_runs(between, message):
    model = nn.Sequential(Inside(between)).double()
    plan = make_plan(model, 1, 2).with_tensor_split(2, {"0.up": "column", "0.down": "row"})
    inputs = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(StageError, match=message):
        trained(model, plan, lambda _: (inputs, torch.zeros(4, dtype=torch.int64)), F.cross_entropy)


def test_what_draws_for_its_rows_only_is_refused_when_it_runs():
    model = nn.Sequential(nn.Linear(4, 4), Draws()).double()
    plan = make_plan(model, 1, 2).with_tensor_split(2, {"0": "data", "1": "data"})
    inputs = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(StageError, match="layer '1' draws random numbers for its tensor rank's"):
        trained(model, plan, lambda _: (inputs, torch.zeros(4, dtype=torch.int64)), F.cross_entropy)


def test_a_parameter_that_all_heads_share_gets_the_sum_of_their_gradients():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(Inside(nn.PReLU())).double()

    ours, theirs = build(), build()
    splits = {"0.up": "column", "0.between": "heads", "0.down": "row"}
    batch = lambda seed: (  # noqa: E731
        torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        torch.arange(4),
    )
    trained(ours, make_plan(ours, 1, 2).with_tensor_split(2, splits), batch, F.cross_entropy)
    one = SingleDevice(theirs, 2, F.cross_entropy, momentum, seed=3)
    for seed in range(2):
        one.step(*batch(seed))
    assert_same(ours, theirs, TOLERANCE)


def make_turned():
    """Values whose dimensions lie in memory in another order than they are counted."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), Lambda(lambda value: value.transpose(1, 2)), nn.Dropout(0.5),
        nn.Dropout(0.3), Lambda(lambda value: value.transpose(0, 1)), nn.Dropout(0.4),
        nn.Dropout(0.5), Lambda(lambda value: value.transpose(0, 1)), nn.Flatten(),
        nn.Linear(30, 4),
    ).double()  # fmt: skip


TURNED = [
    {},
    in_order("data", "data", "data", "whole", "whole", "data", "sequence"),
    in_order("sequence", "whole", "sequence", "data", "whole", "whole", "data"),
    in_order("data", "data", "sequence", "whole", "whole", "sequence", "whole"),
]


@pytest.mark.parametrize("splits", TURNED)
@pytest.mark.parametrize("size", [2, 3])
def test_dropout_behind_turned_values_draws_the_masks_of_one_device(splits, size):
    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(7, 5, 6, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, 4, (7,), generator=generator)

    ours, theirs = make_turned(), make_turned()
    plan = make_plan(ours, 1, 2).with_tensor_split(size, splits)
    losses, outputs = trained(ours, plan, batch, F.cross_entropy)
    expected, told = trained(theirs, make_plan(theirs, 1, 2), batch, F.cross_entropy)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(outputs, told, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)


def test_a_pattern_counts_as_used_if_any_stage_has_what_it_means():
    """'*.mlp.0' may mean a module of any layer: stages without one refused it."""
    ours, theirs = make_net(tied=False), make_net(tied=False)
    inside = {"*.*.mlp.0": "column", "*.*.mlp.2": "features", "*.*.mlp.3": "row"}
    plan = make_plan(ours, 2, 2).with_tensor_split(2, {**inside, "*.logits": "column"})
    assert "*.logits" in plan.stages[0].splits
    losses, outputs = trained(ours, plan, partial(net_batch, 4), net_loss)
    alone, expected = trained(theirs, make_plan(theirs, 2, 2), partial(net_batch, 4), net_loss)
    assert same(losses, alone, TOLERANCE)
    assert same(outputs, expected, TOLERANCE)
