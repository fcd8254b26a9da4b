"""Small nets, trained three steps on a device and on the CPU: the weights are equal to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.run.materialising import place_buffers, place_parameters
from tests.kit.kernels import kernels_for_an_lstm
from tests.kit.tiny_models import conv_batch, gpt_batch, make_conv_net, make_gpt
from tests.numerics.test_captured_models import (
    Normalising,
    TiedLM,
    bert,
    gpt2,
    masked_tokens,
    of_words,
    tokens,
)
from tests.numerics.test_one_logical_model_shared import UNet, picture_batch
from tests.oracles import nets

pytestmark = pytest.mark.usefixtures("accelerator")

DEVICE = "emu:1"
STEPS = 3


def moved(value, device):
    """Tensors of nested inputs, on a device."""
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value.to(device)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(device, build, batch, loss, optimizer, autocast=None, scaler=None):
    """The state of a model after three steps on a device, and the losses."""
    torch.manual_seed(0)
    model = build()
    place_parameters(model, torch.device(device))  # ``Module.to`` breaks ties there
    place_buffers(model.modules(), torch.device(device))
    descent = optimizer([weight for weight in model.parameters() if weight.requires_grad])
    scaler = torch.amp.GradScaler(
        torch.device(device).type, enabled=scaler is not None, **scaler or {}
    )
    inputs, targets = (moved(value, device) for value in batch)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        casting = (
            torch.autocast(torch.device(device).type, autocast)
            if autocast
            else contextlib.nullcontext()
        )
        with casting:
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            value = loss(output, targets)
        descent.zero_grad()
        scaler.scale(value).backward()
        scaler.unscale_(descent)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(descent)
        scaler.update()
        losses.append(value.detach())
    if scaler.is_enabled():
        losses.append(torch.tensor(scaler.get_scale()))
    return {**model.state_dict(), **{f"loss {i}": one for i, one in enumerate(losses)}}


def assert_same(build, batch, loss=F.cross_entropy, optimizer=sgd, **how):
    """Trains on both, and compares all that they keep, to the bit."""
    theirs = trained("cpu", build, batch, loss, optimizer, **how)
    mine = trained(DEVICE, build, batch, loss, optimizer, **how)
    assert mine.keys() == theirs.keys()
    different = [key for key in mine if not torch.equal(mine[key].cpu(), theirs[key])]
    assert not different
    finite = [value.isfinite().all() for value in theirs.values() if value.is_floating_point()]
    assert all(finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*nets.SIMPLE, *nets.PAIRS, "tied"])
def test_layers_of_the_random_trainings(name, dtype):
    names = ["linear", name, "layer norm", name, "linear"]
    tokens = name in {"gru", "attention"}
    assert_same(
        lambda: nets.make(names, tokens, dtype, seed=2), nets.batch(8, tokens, dtype, seed=3)
    )


def per_word(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def of_hidden(output, targets):
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, targets)


MODELS = {
    "GPT": (make_gpt, lambda: gpt_batch(8, 0), per_word),
    "convolutions": (make_conv_net, lambda: conv_batch(8, 0), F.cross_entropy),
    "GPT-2": (gpt2, lambda: ({"input_ids": tokens()}, tokens()), of_words),
    "BERT": (bert, lambda: (masked_tokens(), tokens()), of_words),
    "tied words": (TiedLM, lambda: (tokens(), tokens()), per_word),
    "residual": (
        Normalising, lambda: (torch.randn(7, 3, 5, 5), torch.randint(0, 5, (7,))), F.cross_entropy,
    ),
    "U-Net": (lambda: UNet(0.3), picture_batch, F.mse_loss),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 24, 0.2, "gelu", batch_first=True),
        lambda: (torch.randn(5, 7, 16), torch.randn(5, 7, 16)), F.mse_loss,
    ),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.PReLU(), nn.InstanceNorm2d(4, affine=True),
            nn.AvgPool2d(2, ceil_mode=True), nn.AdaptiveMaxPool2d(2), nn.Dropout2d(0.2),
            nn.Flatten(), nn.Linear(16, 8), nn.RMSNorm(8), nn.SiLU(), nn.Linear(8, 3),
        ),
        lambda: (torch.randn(6, 3, 14, 14), torch.randint(0, 3, (6,))), F.cross_entropy,
    ),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Softplus(),
            nn.ConvTranspose1d(4, 3, 2, 2), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(30, 3),
        ),
        lambda: (torch.randn(6, 3, 10), torch.randint(0, 3, (6,))), F.cross_entropy,
    ),
    "channels last": (
        lambda: make_conv_net().to(memory_format=torch.channels_last),
        lambda: conv_batch(8, 0), F.cross_entropy,
    ),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)),
        lambda: (torch.randn(5, 6), torch.randint(0, 3, (5,))), F.cross_entropy,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_numerics_tests(name):
    build, batch, loss = MODELS[name]
    torch.manual_seed(5)
    assert_same(build, batch(), loss, lambda weights: torch.optim.AdamW(weights, lr=0.01))


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name):
    """Without autograd torch takes other ways, such as a whole transformer layer in one op."""
    build, batch, _ = MODELS[name]
    torch.manual_seed(5)
    inputs, outputs = batch()[0], []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = build().to(device).eval()
        given = moved(inputs, device)
        with torch.inference_mode():
            output = model(**given) if isinstance(given, dict) else model(given)
        outputs.append(output if isinstance(output, torch.Tensor) else output.logits)
    assert torch.equal(outputs[1].cpu(), outputs[0])


RECURRENT = {
    "one layer": {},
    "deep, both ways": {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    "batch first, no bias": {"bias": False, "batch_first": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, options, dtype):
    torch.manual_seed(5)
    width = 12 if "bidirectional" in options else 6
    batch = torch.randn(5, 4, 3, dtype=dtype), torch.randn(5, 4, width, dtype=dtype)
    assert_same(lambda: kind(3, 6, **options).to(dtype), batch, of_hidden)


class Twice(nn.Module):
    """A recurrent cell, first without and then with what it remembers."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, value):
        return self.cell(value, self.cell(value))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Twice(nn.LSTMCell(4, 4)),
        lambda: Twice(nn.GRUCell(4, 4, bias=False)),
        lambda: Twice(nn.RNNCell(4, 4)),
        lambda: nn.LSTM(4, 6, proj_size=4).double(),
        lambda: nn.RNN(4, 4, nonlinearity="relu"),
    ],
    ids=["LSTM cell", "GRU cell", "simple cell", "projection", "relu"],
)
def test_recurrent_cells(build):
    torch.manual_seed(5)
    shape = (5, 3, 4) if isinstance(build(), nn.RNNBase) else (3, 4)
    dtype = next(build().parameters()).dtype
    assert_same(build, torch.randn(2, *shape, dtype=dtype).unbind(), of_hidden)


class Attending(nn.Module):
    """Attention with heads of eight features, by torch's fast kernels."""

    def __init__(self, **options):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.options = options

    def forward(self, value):
        heads = self.project(value).unflatten(-1, (6, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(*heads.chunk(3, 1), **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"scale": 0.5}],
    ids=["plain", "causal", "dropout", "scale"],
)
def test_attention(options):
    torch.manual_seed(5)
    assert_same(
        lambda: Attending(**options), (torch.randn(3, 5, 16), torch.randn(3, 2, 5, 8)), F.mse_loss
    )


OPTIMIZERS = {
    f"{kind.__name__} {options or ''}".strip(): lambda weights, k=kind, o=options: k(
        weights, lr=0.05, **o
    )
    for kind, options in [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
        (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.Adadelta, {}),
        # Without `foreach`, torch takes it on accelerators alone, and these round otherwise then.
        (torch.optim.NAdam, {"foreach": True}),
        (torch.optim.ASGD, {"foreach": True}),
    ]
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer):
    assert_same(make_conv_net, conv_batch(8, 0), F.cross_entropy, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT", "convolutions", "transformer", "U-Net"])
def test_autocast(name, dtype):
    build, batch, loss = MODELS[name]
    torch.manual_seed(5)
    assert_same(build, batch(), loss, autocast=dtype)


def test_autocast_of_an_lstm():
    torch.manual_seed(5)
    batch = torch.randn(5, 3, 4), torch.randn(5, 3, 6)
    with kernels_for_an_lstm():
        assert_same(lambda: nn.LSTM(4, 6), batch, of_hidden, autocast=torch.bfloat16)


@pytest.mark.parametrize("optimizer", [sgd, lambda weights: torch.optim.Adam(weights, fused=True)])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**120], ids=["finite", "too large"])
def test_scaled_gradients(scale, optimizer):
    """The second scale overflows in the first steps, which are left out."""
    scaler = {"init_scale": scale, "growth_interval": 2, "backoff_factor": 2.0**-7}
    assert_same(
        make_conv_net, conv_batch(8, 0), F.cross_entropy, optimizer,
        autocast=torch.float16, scaler=scaler,
    )  # fmt: skip
