"""Attention by heads, blocks and norms that a group shares compute what one device computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError
from penstock.engine.model.randomness import RandomStream
from penstock.engine.tensor.chain import LayerSharing
from penstock.engine.tensor.sharing import cut_tensors, shared
from penstock.engine.tensor.splits import sharings_of
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import examples
from tests.kit.groups import WORDS, net_batch, net_loss, together
from tests.kit.helpers import make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12
ROWS, LENGTH, WIDTH = 3, 4, 12


class Attending(nn.Module):
    """Calls attention with what it is given, and with masks that it has."""

    def __init__(self, attention, attn_mask, call):
        super().__init__()
        self.attention, self.attn_mask, self.call = attention, attn_mask, call

    def forward(self, given):
        return self.attention(
            given["query"], given["key"], given["value"],
            key_padding_mask=given.get("padding"), attn_mask=self.attn_mask, **self.call,
        )  # fmt: skip


@st.composite
def attentions(draw):
    """(layer, what it is given, layout of the layer)."""
    torch.manual_seed(draw(st.integers(0, 99)))
    first, heads = draw(st.booleans()), draw(st.sampled_from([3, 4]))
    widths = draw(st.sampled_from([{}, {"kdim": 5, "vdim": 7}]))
    attention = nn.MultiheadAttention(
        WIDTH, heads, batch_first=first, dropout=draw(st.sampled_from([0.0, 0.4])),
        bias=draw(st.booleans()), add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()), **widths,
    ).double()  # fmt: skip
    batched = draw(st.sampled_from([True, True, False]))

    def values(length, width):
        shape = ((ROWS, length) if first else (length, ROWS)) if batched else (length,)
        return torch.randn(*shape, width, dtype=torch.float64, requires_grad=True)

    query = values(LENGTH, WIDTH)
    key, value = query, query
    if widths or draw(st.booleans()):
        keys = LENGTH + 1
        key, value = (
            values(keys, widths.get("kdim", WIDTH)),
            values(keys, widths.get("vdim", WIDTH)),
        )
    else:
        keys = LENGTH
    given_ = {"query": query, "key": key, "value": value}
    kind = draw(st.sampled_from(["none", "causal", "2d", "3d"]))
    mask = None
    if kind != "none":
        mask = torch.ones(LENGTH, keys, dtype=torch.bool).triu(1)
        if kind == "2d":
            mask = torch.randn(LENGTH, keys, dtype=torch.float64)
        elif kind == "3d":
            mask = torch.randn((ROWS if batched else 1) * heads, LENGTH, keys, dtype=torch.float64)
    if draw(st.booleans()):
        hidden = torch.zeros((ROWS, keys) if batched else (keys,), dtype=torch.bool)
        hidden[..., -1] = True
        given_["padding"] = hidden.double() * -3.0 if kind in ("2d", "3d") else hidden
    call = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    call["is_causal"] = kind == "causal" and draw(st.booleans())
    layout = draw(st.sampled_from([None, 0, 1])) if batched else None
    return Attending(attention, mask, call), given_, layout


def run(layer, given_):
    """Outputs, and the gradients of what was given."""
    with RandomStream(5):
        outputs = layer(given_)
    outputs = [one for one in outputs if one is not None]
    generator = torch.Generator().manual_seed(7)
    total = sum(
        (one * torch.randn(one.shape, generator=generator, dtype=one.dtype)).sum()
        for one in outputs
    )
    wanted = {id(one): one for one in given_.values() if one.requires_grad}.values()
    return outputs, torch.autograd.grad(total, [*wanted, *layer.parameters()], allow_unused=True)


@examples(25)
@given(case=attentions(), size=st.sampled_from([2, 3]))
def test_attention_by_heads_is_attention(case, size):
    layer, given_, layout = case
    expected, gradients = run(layer, given_)
    num_given = len({id(one) for one in given_.values() if one.requires_grad})
    inner = {
        f"attention.{path}".rstrip("."): way
        for path, way in sharings_of(layer.attention, "heads", "attention").items()
    }
    sharing = LayerSharing("0", None, layout, layout, None, inner=inner)
    cuts = {id(tensor): cut for tensor, cut in cut_tensors(layer, sharing)}

    def member(group):
        memo = {
            id(one): nn.Parameter(cuts[id(one)].part(one.detach(), size, group.index))
            for one in layer.parameters()
            if id(one) in cuts
        }
        own = shared(copy.deepcopy(layer, memo), sharing, group, layer)
        outputs, theirs = run(own, given_)
        assert len(outputs) == len(expected)
        for ours, whole in zip(outputs, expected, strict=True):
            assert same(ours, whole, TOLERANCE)
        for ours, whole in zip(theirs[:num_given], gradients[:num_given], strict=True):
            assert same(ours, whole, TOLERANCE)
        return theirs[num_given:]

    by_member = together(size, member)
    for place, parameter in enumerate(layer.parameters()):
        whole, parts = gradients[num_given + place], [one[place] for one in by_member]
        if id(parameter) in cuts:
            joined = cuts[id(parameter)].joined(parts)
        else:  # a bias behind the sum: in a divided layer every member has a term
            joined = parts[0] if layout is None else sum(parts)
        assert same(joined, whole, TOLERANCE)


class Encoder(nn.Module):
    def __init__(self, norm_first=False, kind="encoder"):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.1))
        options = {"batch_first": True, "dropout": 0.2, "norm_first": norm_first}
        if kind == "encoder":
            layer = lambda: nn.TransformerEncoderLayer(8, 2, 12, **options)  # noqa: E731
        else:
            layer = lambda: Decoding(nn.TransformerDecoderLayer(8, 2, 12, **options))  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, WORDS)
        self.double()

    def spine(self):
        return [self.embed, *self.layers, self.norm, self.head]


class Decoding(nn.Module):
    """A decoder that looks at what it is given, the other way round."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, value):
        return self.decoder(value, value.flip(2))


OWN = {"layers.0": "heads", "layers.1": "heads"}
BY_PATTERNS = {
    "layers.*.self_attn": "heads",
    "layers.*.linear1": "column",
    "layers.*.dropout": "features",
    "layers.*.linear2": "row",
}
SEQUENCE = {"layers.0": "sequence", "layers.1": "data", "norm": "sequence", "head": "row"}
DECODER = {"layers.*.decoder": "heads", "layers.1": "sequence"}


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, OWN | {"head": "column"}),
        ({"norm_first": True}, BY_PATTERNS | SEQUENCE),
        ({"kind": "decoder"}, DECODER | {"norm": "data"}),
    ],
)
def test_blocks_of_torch_train_and_evaluate_as_on_one_device(options, splits):
    ours, theirs = Encoder(**options), Encoder(**options)
    check_trained(ours, theirs, splits)


def check_trained(
    ours, theirs, splits, size=2, batch=lambda seed: net_batch(5, seed), loss=net_loss
):
    plan = make_plan(ours, 1, 2).with_tensor_split(size, splits)
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        losses = [pipeline.step(*batch(seed)) for seed in range(2)]
        outputs = pipeline.evaluate(batch(5)[0])
    one = SingleDevice(theirs, 2, loss, momentum, seed=3)
    assert same(
        torch.stack(losses), torch.stack([one.step(*batch(s)) for s in range(2)]), TOLERANCE
    )
    assert_same(ours, theirs, TOLERANCE)
    theirs.eval()
    value = batch(5)[0]
    with torch.no_grad():
        for layer in theirs.spine() if hasattr(theirs, "spine") else theirs:
            value = layer(value)
    assert same(outputs, value, TOLERANCE)


class Gpt2(nn.Module):
    """Blocks of GPT-2 in transformers, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2, n_embd=12, n_head=3, vocab_size=WORDS, n_positions=8, use_cache=False,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        whole = transformers.GPT2Model(config)
        self.embed, self.h, self.norm = whole.wte, whole.h, whole.ln_f
        self.head = nn.Linear(12, WORDS)
        self.double()

    def spine(self):
        return [self.embed, *self.h, self.norm, self.head]


def test_blocks_of_gpt2_train_as_on_one_device():
    splits = {
        "embed": "row",
        "h.0": "sequence",
        "h.*.attn": "heads",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
        "head": "column",
    }
    check_trained(Gpt2(), Gpt2(), splits)  # three heads for two members


def make_pictures():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.PReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    ).double()


def pictures(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 5, (5,), generator=generator)


@pytest.mark.parametrize("size", [2, 3])  # four groups for three members lie whole
def test_norms_by_channels_train_as_on_one_device(size):
    ways = ["column", "any", "any", "column", "any", "any", "row", "any", "row"]
    splits = dict(zip(map(str, range(len(ways))), ways, strict=True))
    check_trained(make_pictures(), make_pictures(), splits, size, pictures, F.cross_entropy)


class Own(nn.MultiheadAttention):
    def forward(self, *given_, **named):
        return super().forward(*given_, **named)


@pytest.mark.parametrize(
    ("change", "splits", "size", "message"),
    [
        (None, OWN, 3, "'layers.0.self_attn' has 2 heads or groups for 3 tensor ranks, but each"),
        (Own, OWN, 2, "'layers.0.self_attn' (Own) has a forward of its own"),
        (
            None, BY_PATTERNS | {"layers.*.self_attn.out_proj": "row"}, 2,
            "splits say twice how 'layers.0.self_attn.out_proj' is split",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_by_heads_is_refused_by_name(change, splits, size, message):
    model = Encoder()
    if change is not None:
        for layer in model.layers:
            layer.self_attn.__class__ = change
    plan = make_plan(model, 1, 2).with_tensor_split(size, splits)
    with pytest.raises(ModelError) as caught:
        pk.Pipeline(model, plan, loss=net_loss, optimizer=momentum)
    assert message in str(caught.value)
