"""Thirty-one ordinary models, each trained by the README's five lines and on one device.

    python -m examples.any_model              # all, a table
    python -m examples.any_model GPT-2 U-Net  # some

Nothing is done to a model first: no spine, no ``capture``. Those of ``transformers`` are small,
with weights drawn here; their batches carry the labels, and they compute their loss themselves. The
other device computes the same microbatches with the model itself, in a plain loop.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import penstock as pk
from examples.models import detector, resnet

MICROBATCHES, ROWS, STEPS, WORDS = 2, 4, 2, 40


class Case(NamedTuple):
    """A model, a minibatch, and a loss unless the model has its own."""

    model: nn.Module
    inputs: Any
    targets: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None


def trained(case: Case) -> tuple[list[float], int]:
    """The README's lines; gives the losses, and the number of layers that the planner had."""
    model, inputs, targets, loss = case
    rows = ROWS // MICROBATCHES
    sample, labels = _rows(inputs, rows), _rows(targets, rows)
    graph = pk.profile(model, sample, loss=loss, targets=labels, repeats=1, ranks=0)
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=MICROBATCHES, stages=2)
    with pk.Pipeline(model, plan, loss=loss, optimizer=_sgd) as pipeline:
        losses = [float(pipeline.step(inputs, targets)) for _ in range(STEPS)]
    return losses, len(graph.layers)


def on_one_device(case: Case) -> list[float]:
    """A plain loop over the same microbatches."""
    model, optimizer = case.model, _sgd(case.model.parameters())
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for first in range(0, ROWS, ROWS // MICROBATCHES):
            inputs, targets = (
                _rows(part, ROWS // MICROBATCHES, first) for part in (case.inputs, case.targets)
            )
            output = _called(model, inputs)
            loss = output["loss"] if case.loss is None else case.loss(output, targets)
            (loss / MICROBATCHES).backward()
            total += loss.item() / MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def _rows(value: Any, count: int, first: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value[first : first + count]
    if isinstance(value, dict):
        return {key: _rows(part, count, first) for key, part in value.items()}
    return tuple(_rows(part, count, first) for part in value) if value is not None else None


# Models of transformers

_STILL = dict.fromkeys(
    (
        *("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout"),
        *("activation_dropout", "dropout_rate", "hidden_dropout_prob", "hidden_dropout"),
        *("attention_probs_dropout_prob", "classifier_dropout", "drop_path_rate", "layerdrop"),
        *(
            "encoder_layerdrop",
            "decoder_layerdrop",
            "classifier_dropout_prob",
            "summary_first_dropout",
        ),
        *("seq_classif_dropout", "qa_dropout", "feat_proj_dropout", "final_dropout"),
    ),
    0.0,
)
"""Dropout draws other masks on one device; all configurations take all of these names."""
_WIDE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _tokens(length: int = 10) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length))


def _text(length: int = 10, **more: Any) -> dict[str, Tensor]:
    """Padded at the end of the last row, as a tokenizer would."""
    mask = torch.ones(ROWS, length, dtype=torch.long)
    mask[-1, -3:] = 0
    return {"input_ids": _tokens(length), "attention_mask": mask, **more}


def _causal(name: str, task: str = "ForCausalLM", **config: Any) -> Callable[[], Case]:
    def made() -> Case:
        sizes = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = _of(name, task, **{**_WIDE, **sizes, **config})
        tokens = _tokens()
        return Case(model, {"input_ids": tokens, "labels": tokens.clone()})

    return made


def _of(name: str, task: str, **config: Any) -> nn.Module:
    made = getattr(hf, f"{name}Config")(**{**_STILL, **config})
    model: nn.Module = getattr(hf, f"{name}{task}")(made)
    return model.train()


def _encoder(
    name: str, task: str, labels: Callable[[], Tensor], **config: Any
) -> Callable[[], Case]:
    def made() -> Case:
        sizes = {"vocab_size": WORDS, "max_position_embeddings": 24, "pad_token_id": 0}
        model = _of(name, task, **{**_WIDE, **sizes, "num_labels": 3, **config})
        return Case(model, _text(labels=labels()))

    return made


def _translator(name: str, **config: Any) -> Callable[[], Case]:
    def made() -> Case:
        sizes = {"vocab_size": WORDS, "d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
        model = _of(name, "ForConditionalGeneration", **{**sizes, **config})
        return Case(model, _text(labels=_tokens(7)))

    return made


def _pictures(name: str, **config: Any) -> Callable[[], Case]:
    def made() -> Case:
        model = _of(name, "ForImageClassification", **{"image_size": 32, "num_labels": 5, **config})
        labels = torch.randint(5, (ROWS,))
        return Case(model, {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": labels})

    return made


def _whisper() -> Case:
    sizes = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "encoder_layers": 2}
    more = {"decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": WORDS}
    model = _of("Whisper", "ForConditionalGeneration", **sizes, **more, **special, **widths)
    return Case(model, {"input_features": torch.randn(ROWS, 8, 32), "labels": _tokens(7)})


# Models of one's own


class UNet(nn.Module):
    """Halves the resolution twice, doubles it twice, and joins what was as large before."""

    def __init__(self, channels: int = 8, conditioned: bool = False) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in ((3, 8), (8, 16)))
        self.bottom = _convolutions(16, 32)
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 16), (16, 8)))
        self.up = nn.ModuleList(_convolutions(a, b) for a, b in ((32, 16), (16, 8)))
        self.last = nn.Conv2d(channels, 3, 1)
        self.times = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.conditioned = conditioned

    def forward(self, picture: Tensor, step: Tensor | None = None) -> Tensor:
        """[rows, 3, height, width], and the diffusion's step of each row."""
        kept = []
        for block in self.down:
            picture = block(picture)
            kept.append(picture)
            picture = F.max_pool2d(picture, 2)
        picture = self.bottom(picture)
        if step is not None:
            angles = step[:, None] * torch.logspace(0, -3, 8, device=step.device)
            told = self.times(torch.cat([angles.sin(), angles.cos()], dim=-1))
            picture = picture + told[:, :, None, None]
        for raised, block in zip(self.raise_, self.up, strict=True):
            picture = block(torch.cat([kept.pop(), raised(picture)], dim=1))
        return self.last(picture)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
    )


class Tagger(nn.Module):
    """A stack of LSTMs with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, words] → [rows, words, 5]."""
        value = self.words(tokens)
        for layer in self.layers:
            value = value + layer(value)[0]
        return self.head(value)


class Translator(nn.Module):
    """An encoder and a decoder of GRUs with attention, fed with the words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)
        self.head.weight = self.words.weight  # tied

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        """Two times [rows, words] → [rows, words, WORDS]."""
        read, state = self.encoder(self.words(source))
        written, _ = self.decoder(self.words(before), state)
        return self.head(written + self.attention(written, read, read, need_weights=False)[0])


class WithLoss(nn.Module):
    """Returns a dictionary with its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """[rows, 12] → {"scores": [rows, 4]}, and "loss" if there are labels."""
        inner = self.first(values).relu()
        scores = self.last(inner + self.second(inner).relu())
        if labels is None:
            return {"scores": scores}
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


class Experts(nn.Module):
    """Each word goes to the expert that its router likes best, and nowhere else."""

    def __init__(self, width: int = 16, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, value: Tensor) -> Tensor:
        """[rows, words, width] → the same."""
        flat = value.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows) > 0:
                output = output.index_add(0, rows, weights[rows, None] * expert(flat[rows]))
        return output.view_as(value)


class Mixture(nn.Module):
    """A tagger whose blocks are mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, words] → [rows, words, 5]."""
        value = self.words(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            value = value + block(norm(value))
        return self.head(value)


class GraphNet(nn.Module):
    """Sums what neighbours say: edges are scattered into nodes, a graph per row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.says = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """[rows, nodes, 6] and [rows, edges, 2] → [rows, 3]."""
        value = self.first(nodes)
        sources, ends = (edges[..., side, None].expand(-1, -1, 16) for side in (0, 1))
        for says in self.says:
            told = says(value).gather(1, sources)
            value = value + torch.zeros_like(value).scatter_add(1, ends, told).relu()
        return self.last(value.mean(1))


class Halting(nn.Module):
    """Thinks as often as its input says, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.think = nn.Linear(16, 16)

    def forward(self, value: Tensor, times: Tensor) -> Tensor:
        """[rows, 16] and [rows] → [rows, 16]."""
        for number in range(int(times.max())):
            value = torch.where((number < times)[:, None], self.think(value).tanh(), value)
        return value


class Pondering(nn.Module):
    """A loop of a length that a value gives, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halting, self.last = nn.Linear(12, 16), Halting(), nn.Linear(16, 4)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """[rows, 12] and [rows] → [rows, 4]."""
        return self.last(self.halting(self.first(values), times))


class AutoEncoder(nn.Module):
    """Returns a picture and what it was squeezed into, for a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.ReLU())
        self.mean, self.spread = nn.Linear(24, 6), nn.Linear(24, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 48))

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, 3, 4, 4] → the same, and means and spreads [rows, 6]."""
        inner = self.encoder(picture)
        mean, spread = self.mean(inner), self.spread(inner)
        return self.decoder(mean + spread.exp() * 0.1).view_as(picture), mean, spread


def _evidence(output: tuple[Tensor, Tensor, Tensor], picture: Tensor) -> Tensor:
    again, mean, spread = output
    return F.mse_loss(again, picture) + 0.1 * (mean**2 + spread.exp() - spread - 1).mean()


def _by_token(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _resnet() -> Case:
    pixels, labels = resnet.batch(ROWS, "small", torch.Generator().manual_seed(0))
    return Case(resnet.build("small"), pixels, labels, resnet.loss)


def _detector() -> Case:
    inputs, targets = detector.batch(ROWS, "small", torch.Generator().manual_seed(0))
    return Case(detector.build("small"), inputs, targets, detector.loss)


def _noise(conditioned: bool) -> Case:
    pictures = torch.randn(ROWS, 3, 16, 16)
    steps = {"step": torch.randint(100, (ROWS,)).float()} if conditioned else {}
    inputs = {"picture": pictures, **steps}
    return Case(UNet(), inputs, torch.randn(ROWS, 3, 16, 16), F.mse_loss)


def _graphs() -> Case:
    edges = torch.randint(7, (ROWS, 12, 2))
    targets = torch.randint(3, (ROWS,))
    return Case(GraphNet(), (torch.randn(ROWS, 7, 6), edges), targets, F.cross_entropy)


def _ponder() -> Case:
    inputs = (torch.randn(ROWS, 12), torch.tensor([1, 3, 2, 1]))
    return Case(Pondering(), inputs, torch.randint(4, (ROWS,)), F.cross_entropy)


def _squeeze() -> Case:
    pictures = torch.randn(ROWS, 3, 4, 4)
    return Case(AutoEncoder(), pictures, pictures, _evidence)


CASES: dict[str, Callable[[], Case]] = {
    "GPT-2": _causal("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=24),
    "Llama": _causal("Llama", num_key_value_heads=2),
    "Mistral": _causal("Mistral", num_key_value_heads=2),
    "Qwen 2": _causal("Qwen2", num_key_value_heads=2),
    "Gemma": _causal("Gemma", num_key_value_heads=2, head_dim=8),
    "Phi": _causal("Phi"),
    "GPT-NeoX": _causal("GPTNeoX"),
    "OPT": _causal("OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=24),
    "Mixtral": _causal("Mixtral", num_key_value_heads=2, num_local_experts=3),
    "BERT": _encoder("Bert", "ForMaskedLM", _tokens),
    "RoBERTa": _encoder("Roberta", "ForTokenClassification", lambda: _tokens() % 3),
    "ALBERT": _encoder(
        "Albert", "ForSequenceClassification", lambda: torch.randint(3, (ROWS,)), embedding_size=16
    ),
    "DistilBERT": _encoder(
        "DistilBert", "ForSequenceClassification", lambda: torch.randint(3, (ROWS,)),
        dim=32, hidden_dim=64, n_layers=2, n_heads=4,
    ),
    "T5": _translator("T5", d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "BART": _translator(
        "Bart", encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=24,
    ),
    "Whisper": _whisper,
    "ViT": _pictures("ViT", patch_size=8, **_WIDE),
    "DeiT": _pictures("DeiT", patch_size=8, **_WIDE),
    "Swin": _pictures(
        "Swin", patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2
    ),
    "ConvNeXt": _pictures("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "ResNet": _resnet,
    "U-Net": lambda: _noise(conditioned=False),
    "diffusion U-Net with timesteps": lambda: _noise(conditioned=True),
    "detector": _detector,
    "LSTM stack": lambda: Case(Tagger(), _tokens(), _tokens() % 5, _by_token),
    "seq2seq, tied": lambda: Case(Translator(), (_tokens(), _tokens(8)), _tokens(8), _by_token),
    "a dictionary with its loss": lambda: Case(
        WithLoss(), {"values": torch.randn(ROWS, 12), "labels": torch.randint(4, (ROWS,))}
    ),
    "mixture of experts": lambda: Case(Mixture(), _tokens(), _tokens() % 5, _by_token),
    "graph net with scatter": _graphs,
    "a loop as long as a value": _ponder,
    "variational autoencoder": _squeeze,
}  # fmt: skip


def compared(name: str) -> tuple[int, float]:
    """The number of layers, and by how much the losses differ, relatively."""
    torch.manual_seed(0)
    case = CASES[name]()
    twin = copy.deepcopy(case)
    losses, layers = trained(case)
    pairs = zip(losses, on_one_device(twin), strict=True)
    return layers, max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def main(names: list[str]) -> int:
    """Print the table; gives the number of models that did not train as on one device."""
    table = Table("model", "layers", "losses differ by", "seconds", "needed")
    failed = 0
    for name in names or CASES:
        begun = time.perf_counter()
        try:
            layers, apart = compared(name)
        except pk.PenstockError as error:
            failed += 1
            table.add_row(name, "", "", "", f"[red]{error}")
            continue
        failed += apart > 1e-4
        seconds = time.perf_counter() - begun
        table.add_row(
            name, str(layers), f"{apart:.0e}" if apart else "0", f"{seconds:.0f}", "nothing"
        )
    Console().print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
