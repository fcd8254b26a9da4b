"""Which parts of layers tensor ranks can share: found in modules, or declared."""

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError
from penstock.demo import gpt
from penstock.engine.model.spine import spine_of
from penstock.engine.tensor.chain import walk
from penstock.engine.tensor.parts import parts_in, with_ties_alike
from penstock.engine.tensor.splits import sharing_of
from penstock.training.profiler.alone.measuring import found_parts


class Attention(nn.Module):
    """Under names that nobody knows."""

    tensor_splits = {"a": "column/3", "b": "row"}  # noqa: RUF012 - as people write it

    def __init__(self, pieces=4):
        super().__init__()
        self.tensor_pieces = pieces
        self.a, self.b = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, value):
        return self.b(self.a(value).unflatten(-1, (3, -1))[..., 0, :])


class Grouped(nn.Module):
    """As attention in transformers, with two heads of keys for four of queries."""

    def __init__(self, keys=2):
        super().__init__()
        self.head_dim = 2
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 2 * keys), nn.Linear(8, 2 * keys)


class Gated(nn.Module):
    def __init__(self, inside=12):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, inside), nn.Linear(8, 12)
        self.act, self.down_proj = nn.Softplus(beta=2), nn.Linear(12, 8)


class OwnActivation(nn.Module):
    def forward(self, value):
        return value * torch.sigmoid(1.7 * value)


def parts(*modules, is_last=False):
    model = nn.Sequential(nn.Sequential(*modules), nn.Identity())
    return parts_in(spine_of(model)[0], model, is_last=is_last)


def test_attention_and_mlp_are_told_by_their_projections():
    attention, mlp = parts(Grouped(), Gated())
    assert (attention.kind, attention.pieces, attention.key_value_heads) == ("attention", 4, 2)
    assert set(attention.splits.values()) == {"column", "row"}
    assert (mlp.kind, mlp.gated, mlp.pieces) == ("mlp", True, 12)
    assert mlp.splits["1.down_proj"] == "row"


def test_modules_whose_sizes_do_not_fit_are_no_parts():
    wrong = Grouped()
    wrong.o_proj = nn.Linear(6, 8)
    assert parts(wrong) == []
    assert parts(Gated(inside=10)) == []


def test_an_activation_of_ones_own_goes_with_its_mlp_if_it_works_number_by_number():
    mlp = Gated()
    mlp.act = OwnActivation()
    assert parts(mlp)[0].splits["0.act"] == "features"
    mlp.act = nn.Softmax(-1)
    assert "0.act" not in parts(mlp)[0].splits


def test_a_block_of_torch_is_one_part_that_sums_twice():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 8))
    (block,) = parts_in(spine_of(model)[0], model, is_last=False)
    assert (block.kind, block.splits, block.pieces, block.num_sums) == (
        "block",
        {"": "heads"},
        2,
        2,
    )
    assert parts_in(spine_of(model)[1], model, is_last=True) == []  # a linear layer as such


def test_declared_parts_are_what_their_author_says():
    (part,) = parts(Attention())
    assert (part.kind, part.pieces, part.is_even) == ("declared", 4, True)
    assert part.splits == {"0.a": "column/3", "0.b": "row"}
    blocks = gpt.GPT(width=16, heads=2, layers=1, context=8)
    kinds = [part.kind for layer in spine_of(blocks) for part in parts_in(layer, blocks, is_last=0)]
    assert kinds == ["embedding", "declared", "declared"]


@pytest.mark.parametrize(
    ("splits", "pieces", "words"),
    [
        ({"c": "column", "b": "row"}, 4, "names 'c', but there is no such module in it"),
        ({"a": "column/3"}, 4, 'begins with a "column" and ends with a "row"'),
        ({"a": "column/3", "b": "row"}, "four", "tensor_pieces of Attention is 'four'"),
    ],
)
def test_a_declaration_that_is_not_true_is_refused(splits, pieces, words):
    module = Attention(pieces)
    module.tensor_splits = splits
    with pytest.raises(ModelError, match=words):
        parts(module)


def test_tied_weights_are_parts_where_all_divide_them_alike():
    model = nn.Sequential(nn.Sequential(Gated(), nn.Identity()), nn.Identity())
    layer = spine_of(model)[0]
    own = parts_in(layer, model, is_last=False)
    assert with_ties_alike([layer], [own], {id(model[0][0].down_proj.weight)}) == [[]]
    words = gpt.GPT(vocabulary=32, width=16, heads=2, layers=1, context=8)
    words.head.logits.weight = words.embedding.tokens.weight
    layers = spine_of(words)
    found = found_parts(words, layers)
    assert [part.kind for own in (found[0], found[-1]) for part in own.parts] == [
        "embedding",
        "head",
    ]
    # A holder that is no part of its layer has all of it, so nobody can have some.
    words.embedding.positions = nn.Embedding(8, 16)
    words.head.norm.extra = words.embedding.tokens.weight
    words.blocks[0].mlp_norm.extra = words.embedding.tokens.weight
    found = found_parts(words, spine_of(words))
    assert [*found[0].parts, *found[-1].parts] == []


def test_a_profile_says_what_is_inside_the_parts():
    model = gpt.GPT(vocabulary=32, width=16, heads=2, layers=2, context=8)
    tokens = torch.randint(0, 32, (4, 8))
    graph = pk.profile(model, tokens, ranks=0)
    attention, mlp = graph.layers[1].parts
    hidden = 4 * 8 * 16 * 4
    assert attention.border_bytes == attention.output_bytes == mlp.border_bytes == hidden
    # The MLP keeps what goes into GELU and what comes out; both are four times as wide.
    assert mlp.activation_bytes == 2 * 4 * hidden
    assert mlp.parameter_bytes == 4 * (16 * 64 + 64 + 64 * 16)
    assert 0 < attention.forward_share < 1
    assert attention.forward_share + mlp.forward_share < 1
    assert attention.activation_bytes + mlp.activation_bytes < graph.layers[1].activation_bytes


def test_only_a_linear_layer_at_the_end_gives_logits_in_parts():
    assert sharing_of(nn.Linear(8, 32), "vocabulary", "head").cuts["weight"] == (0, 1, 1)
    with pytest.raises(ModelError, match="the head that gives the logits is a linear layer"):
        sharing_of(nn.Conv1d(8, 32, 1), "vocabulary", "head")
    layers = spine_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(
        ModelError, match=r"but other layers come behind '0'; split it as \"column\""
    ):
        walk(layers, ["vocabulary", "whole"], [{}, {}], [2, 2])
