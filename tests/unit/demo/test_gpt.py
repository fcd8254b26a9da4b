"""The demonstration model: a spine that is the whole model, and a sensible start."""

import math

import pytest
import torch

from penstock.base.errors import InputError
from penstock.demo import GPT, loss
from penstock.engine.model.spine import spine_of


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return GPT(width=16, heads=2, layers=3, context=8)


def random_tokens(rows=2, length=8, seed=1):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_running_the_spine_is_running_the_model(tiny):
    hidden = random_tokens()
    for layer in tiny.spine():
        hidden = layer(hidden)
    assert torch.equal(hidden, tiny(random_tokens()))
    assert hidden.shape == (2, 8, 256)


def test_spine_is_embedding_blocks_head_and_covers_the_state_dict(tiny):
    layers = spine_of(tiny)
    assert [layer.name for layer in layers] == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "head",
    ]  # fmt: skip
    keys = [f"{layer.prefix}.{key}" for layer in layers for key in layer.module.state_dict()]
    assert keys == list(tiny.state_dict())


def test_no_parameter_is_shared_between_layers(tiny):
    parameters = [id(p) for layer in tiny.spine() for p in layer.parameters()]
    assert len(parameters) == len(set(parameters)) == len(list(tiny.parameters()))


def test_default_size():
    with torch.device("meta"):
        model = GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_043_520
    assert len(model.spine()) == 10


def test_a_position_sees_nothing_that_follows_it(tiny):
    tokens = random_tokens(rows=1)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = tiny(tokens), tiny(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[0, 5], after[0, 5])


def test_shorter_sequences_are_fine_and_longer_ones_say_what_to_do(tiny):
    assert tiny(random_tokens(length=3)).shape == (2, 3, 256)
    with pytest.raises(InputError, match=r"9 tokens.*context is 8.*GPT\(context=9\)"):
        tiny(random_tokens(length=9))


@pytest.mark.parametrize("lengths", [[8], [4, 4], [1, 5, 2], [1] * 8])
def test_slices_joined_equal_the_whole(tiny, lengths):
    tiny.double()
    tokens = random_tokens()
    whole, joined = tokens, tokens.split(lengths, 1)
    for layer in tiny.spine():
        whole, carry, outputs = layer(whole), None, []
        for part in joined:
            if getattr(layer, "by_position", False):
                outputs.append(layer(part))
            else:
                output, carry = layer.forward_slice(part, carry)
                outputs.append(output)
        joined = outputs
        torch.testing.assert_close(torch.cat(joined, 1), whole, rtol=1e-12, atol=1e-12)


def test_slices_may_not_exceed_the_context_together(tiny):
    with pytest.raises(InputError, match=r"9 tokens.*context is 8"):
        tiny.embedding.forward_slice(random_tokens(length=4), 5)


def test_initial_loss_is_that_of_a_uniform_guess(tiny):
    value = loss(tiny(random_tokens()), random_tokens(seed=2))
    assert value.shape == ()
    assert value.item() == pytest.approx(math.log(256), abs=0.1)


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    block = GPT(width=128, heads=2, layers=8).blocks[0]
    assert block.mlp.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for project in (block.attention.project, block.mlp.project):
        assert project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_loss_of_the_whole_is_the_mean_over_equal_microbatches(tiny):
    logits, targets = tiny(random_tokens(rows=4)), random_tokens(rows=4, seed=2)
    parts = [loss(*part) for part in zip(logits.chunk(2), targets.chunk(2), strict=True)]
    torch.testing.assert_close(loss(logits, targets), sum(parts) / 2)


def test_it_learns_a_fixed_batch(tiny):
    optimizer = torch.optim.AdamW(tiny.parameters(), lr=1e-2)
    tokens, targets = random_tokens(), random_tokens(seed=2)
    losses = []
    for _ in range(30):
        value = loss(tiny(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] / 4


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = GPT(width=16, heads=2, layers=1, context=8, dropout=0.5)
    tokens = random_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 3}, "width 10 does not divide into 3 heads"),
        ({"layers": 0}, "layers is 0, but must be ≥ 1"),
        ({"dropout": 1.0}, r"dropout is 1.0, but must be in \[0, 1\)"),
    ],
)
def test_unusable_sizes_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GPT(**options)
