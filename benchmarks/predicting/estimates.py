"""Ten models estimated for this machine, as ``penstock measure-device`` describes it, and measured.

``python -m benchmarks.predicting.estimates`` takes some minutes. Times are processor time of one
thread: others may work here meanwhile.
"""

from __future__ import annotations

import statistics as st
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as pk
from benchmarks.common.alone import publish
from penstock.core import catalogue
from penstock.training.estimating.measured_device import measure_device
from penstock.training.profiler.alone import Sample, measure_uncut
from penstock.training.profiler.profiling import traced_unless_a_chain


class SmallBlock(nn.Module):
    """A transformer's layer, before which norms stand."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class SmallResidual(nn.Module):
    """Two convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.deep = nn.Conv2d(64, 64, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.first(x))
        low = F.relu(self.deep(F.relu(self.down(high))))
        return self.last(torch.cat([self.up(low), high], 1))


class Recurrent(nn.Module):
    """An LSTM whose state nobody wants."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Scan(nn.Module):
    """A gated linear recurrence over chunks, as state-space models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay, given, gate = self.gates(x).chunk(3, -1)
        state, outputs = torch.zeros_like(given[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.sigmoid(decay[:, step]) * state + given[:, step]
            outputs.append(state)
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


class Experts(nn.Module):
    """Eight experts, of each of which every token has a share of the capacity."""

    def __init__(self, width: int, num: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.up = nn.Parameter(torch.randn(num, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        chosen = shares.topk(len(tokens) // 8, 0)
        taken = tokens[chosen.indices.t()]
        made = torch.bmm(F.gelu(torch.bmm(taken, self.up)), self.down)
        weighted = made * chosen.values.t().unsqueeze(-1)
        y = torch.zeros_like(tokens).index_add(
            0, chosen.indices.t().flatten(), weighted.flatten(0, 1)
        )
        return x + y.view_as(x)


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(d_model=128, d_ff=512, d_kv=32, num_heads=4, num_layers=3,
                                   vocab_size=1000))  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=512, vocab_size=1000)  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


_PICTURES, _TOKENS = torch.randn(8, 3, 32, 32), torch.randint(1, 1000, (4, 64))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "GPT": (
        lambda: nn.Sequential(
            nn.Embedding(1000, 192), *[SmallBlock(192, 6, True) for _ in range(4)],
            nn.LayerNorm(192), nn.Linear(192, 1000),
        ),
        torch.randint(0, 1000, (4, 128)),
    ),
    "BERT": (_bert, _TOKENS),
    "ViT": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 192, 4, 4), nn.Flatten(2), nn.Linear(64, 64),
            nn.Unflatten(1, (192, 1)), nn.Flatten(1, 2), nn.Linear(64, 192),
            *[SmallBlock(192, 3, False) for _ in range(4)], nn.LayerNorm(192),
        ),
        _PICTURES,
    ),
    "VGG": (_vgg, _PICTURES),
    "ResNet": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 48, 3, padding=1), *[SmallResidual(48) for _ in range(4)],
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
        ),
        _PICTURES,
    ),
    "U-Net": (UNet, _PICTURES),
    "LSTM": (lambda: nn.Sequential(Recurrent(), nn.Linear(128, 10)), torch.randn(8, 32, 128)),
    "T5": (_t5, _TOKENS),
    "scan": (lambda: nn.Sequential(*[Scan(128) for _ in range(3)]), torch.randn(8, 32, 128)),
    "MoE": (
        lambda: nn.Sequential(
            *[part for _ in range(3) for part in (SmallBlock(128, 4, True), Experts(128))]
        ),
        torch.randn(4, 64, 128),
    ),
}  # fmt: skip


def _shares(graph: pk.LayerGraph) -> list[float]:
    whole = sum(layer.compute_seconds for layer in graph.layers)
    return [layer.compute_seconds / whole for layer in graph.layers]


def main() -> None:
    """Describe this machine, estimate and measure all models, and print one line for each."""
    folder = Path(tempfile.mkdtemp())
    file = folder / "mine.toml"
    file.write_text(catalogue.as_toml(measure_device("mine")))
    print(
        f"{'model':8s}{'estimated':>12s}{'measured':>12s}{'error':>8s}{'balance':>9s}{'kept':>8s}"
    )
    errors = []
    for name, (build, inputs) in MODELS.items():
        torch.manual_seed(0)
        model = build()
        estimated = pk.estimate(model, inputs, device=str(file))
        measured = pk.profile(model, inputs, repeats=9, ranks=0, progress=lambda *_: None)
        whole, sample = traced_unless_a_chain(model, inputs), Sample(inputs, None, None)
        alone = measure_uncut(whole, sample, 1, warm_up=3, at_least=9)
        seconds = sum(layer.compute_seconds for layer in estimated.layers)
        error = seconds / alone.cpu_seconds - 1
        pairs = zip(_shares(estimated), _shares(measured), strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        kept = [
            sum(layer.activation_bytes for layer in graph.layers) for graph in (estimated, measured)
        ]
        errors.append(abs(error))
        print(
            f"{name:8s}{seconds * 1e3:9.2f} ms{alone.cpu_seconds * 1e3:9.2f} ms{error:+8.0%}"
            f"{apart * 100:5.1f} pts{kept[0] / kept[1] - 1:+8.1%}",
            flush=True,
        )
    print(f"median {st.median(errors):.0%}, most {max(errors):.0%} (goals: 10 %, 20 %)")


if __name__ == "__main__":
    publish(main)
