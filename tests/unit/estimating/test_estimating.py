"""``estimate``: a profile from shapes alone."""

import copy
import re
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

import penstock as pk
from benchmarks.predicting.estimates import Experts, Recurrent, SmallBlock, UNet
from penstock.core import catalogue
from penstock.engine.tracing import captured
from penstock.planning.planner import what_if
from penstock.planning.plans.explanation import explain
from penstock.training.estimating import operations
from penstock.training.estimating.blocks import repeated_blocks
from penstock.training.estimating.counting import KernelCounter
from penstock.training.estimating.operations import padding_of
from penstock.training.estimating.substitutes import AsOnDevice, autocast_dtype
from tests.kit.training import KeepingGradients

BYTES = (
    "activation_bytes", "held_input_bytes", "weight_kept_bytes", "output_bytes", "skip_bytes",
    "parameter_bytes", "buffer_bytes", "optimizer_bytes",
)  # fmt: skip


@pytest.fixture(scope="session")
def cpu(tmp_path_factory):
    """The file of a CPU that nobody measured, for what does not depend on how fast it is."""
    entry = replace(catalogue.device_named("a100"), name="core", kind="cpu")
    path = tmp_path_factory.mktemp("devices") / "core.toml"
    path.write_text(catalogue.as_toml(entry))
    return str(path)


class Encoder(nn.Module):
    """Traced, with as many blocks as one wants, and a head that is the embedding."""

    def __init__(self, num_blocks=5):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        value = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def chain():
    return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 10))


MODELS = {
    "chain": (chain, lambda: torch.randn(6, 32)),
    "blocks": (
        lambda: nn.Sequential(*[SmallBlock(32, 4, True) for _ in range(2)]),
        lambda: torch.randn(2, 8, 32),
    ),
    "u-net": (UNet, lambda: torch.randn(2, 3, 16, 16)),
    "encoder": (Encoder, lambda: torch.randint(0, 50, (2, 8))),
    "experts": (lambda: nn.Sequential(Experts(32)), lambda: torch.randn(2, 8, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_layers_and_fingerprint_are_those_of_the_profile(name, cpu):
    build, sample = MODELS[name]
    model, inputs = build(), sample()
    options = {"optimizer": torch.optim.AdamW}
    estimated = pk.estimate(model, inputs, device=cpu, **options)
    measured = pk.profile(model, inputs, repeats=1, ranks=0, **options)
    assert estimated.fingerprint == measured.fingerprint
    for ours, theirs in zip(estimated.layers, measured.layers, strict=True):
        for field in (*BYTES, "name", "kind", "inputs", "unit", "signature", "shared_parameters"):
            assert getattr(ours, field) == getattr(theirs, field), (ours.name, field)


def test_memory_is_what_torch_itself_counts_under_fake_tensors(cpu):
    def build():
        return nn.Sequential(
            nn.Linear(64, 64), *[SmallBlock(64, 4, True) for _ in range(3)], nn.Linear(64, 64)
        )

    with FakeTensorMode():
        model, inputs = build(), torch.randn(4, 32, 64)
        tracker = MemTracker()
        tracker.track_external(model, inputs)
        with tracker:
            output = model(inputs)
            (counted,) = tracker.get_tracker_snapshot().values()
        assert output.shape == (4, 32, 64)
    with torch.device("meta"):
        model, inputs = build(), torch.empty(4, 32, 64)
    graph = pk.estimate(model, inputs, device=cpu)
    kept = sum(layer.activation_bytes for layer in graph.layers) + graph.layers[-1].output_bytes
    assert kept == counted[_MemRefType.ACT] + counted[_MemRefType.OTH]  # with the input
    parameters = sum(layer.parameter_bytes for layer in graph.layers)
    assert parameters == counted[_MemRefType.PARAM]


def test_seconds_of_a_product_are_those_of_its_flops_at_the_peak_of_its_dtype():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).bfloat16()
        inputs = torch.empty(8192, 4096, dtype=torch.bfloat16)
    layer = pk.estimate(model, inputs, device="a100").layers[1]
    flops = 2 * 8192 * 4096 * 4096
    at_peak = flops / 312e12
    assert at_peak / 0.75 < layer.forward_seconds < at_peak / 0.6
    for half in (layer.backward_input_seconds, layer.backward_weight_seconds):
        assert half == pytest.approx(layer.forward_seconds, rel=0.2)


def test_a_faster_device_is_faster_and_twice_the_rows_take_longer():
    with torch.device("meta"):
        model = nn.Sequential(*[SmallBlock(1024, 16, True) for _ in range(2)]).bfloat16()
        inputs = torch.empty(4, 2048, 1024, dtype=torch.bfloat16)
    a100, h100 = (
        pk.estimate(model, inputs, device=name, sizes=[2], software="graph")
        for name in ("a100", "h100")
    )
    for mine, theirs in zip(a100.layers, h100.layers, strict=True):
        assert mine.forward_seconds > 1.5 * theirs.forward_seconds
    for half, whole in zip(h100.at(2).layers, h100.layers, strict=True):
        assert half.compute_seconds < whole.compute_seconds < 2.5 * half.compute_seconds
        assert whole.activation_bytes == pytest.approx(2 * half.activation_bytes, rel=1e-5)


def test_repeated_blocks_say_what_the_whole_model_does():
    with torch.device("meta"):
        model, inputs = Encoder(5), torch.empty(2, 8, dtype=torch.long)
    assert repeated_blocks(model) == [("blocks", 5)]
    short = pk.estimate(model, inputs, device="h100")
    assert len(model.blocks) == 5
    model.blocks[4].odd = True  # now one is not like the others, and all are traced
    assert repeated_blocks(model) == []
    whole = pk.estimate(model, inputs, device="h100")
    assert short.fingerprint == whole.fingerprint
    for ours, theirs in zip(short.layers, whole.layers, strict=True):
        assert ours == replace(theirs, **{name: getattr(ours, name) for name in _SECONDS})
        for name in _SECONDS:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name))


@pytest.mark.parametrize(("trains", "modes"), [(True, {True}), (False, {True, False})])
def test_a_model_that_trains_is_traced_in_that_mode_alone(trains, modes, monkeypatch):
    seen, traced = set(), captured._traced

    def watched(model, *arguments):
        seen.add(model.training)
        return traced(model, *arguments)

    monkeypatch.setattr(captured, "_traced", watched)
    with torch.device("meta"):
        model, inputs = Encoder(1).train(trains), torch.empty(2, 8, dtype=torch.long)
    pk.estimate(model, inputs, device="h100")
    assert seen == modes


_SECONDS = [name for name in pk.Layer.__struct_fields__ if name.endswith("_seconds")]


def test_fused_attention_keeps_no_scores_and_the_formula_does():
    with torch.device("meta"):
        model = nn.Sequential(SmallBlock(64, 4, False)).half()
        inputs = torch.empty(2, 256, 64, dtype=torch.half)
    fused, formula = (
        pk.estimate(model, inputs, device="a100", attention=kind).layers[0].activation_bytes
        for kind in ("fused", "formula")
    )
    assert formula - fused > 2 * 4 * 256 * 256 * 2


@pytest.mark.parametrize(
    ("build", "shape", "basis"),
    [
        (lambda: SmallBlock(64, 4, True), (2, 16, 64), "torchtitan"),
        (lambda: nn.Conv2d(3, 8, 3), (2, 3, 16, 16), "a guess: published runs .* transformers"),
        (lambda: Steps(nn.GRU), (2, 5, 40), "a guess: published runs .* transformers"),
    ],
)
def test_the_error_to_expect_depends_on_the_kind_of_model(build, shape, basis, cpu):
    with torch.device("meta"):
        model, inputs = nn.Sequential(build()), torch.empty(shape)
    estimate = pk.estimate(model, inputs, device="a100").estimate
    assert re.search(basis, estimate.basis)
    here = pk.estimate(model, inputs, device=cpu).estimate
    assert "measured CPU" in here.basis and here.error != estimate.error


class Masked(nn.Module):
    """Attention with a mask of all pairs, as captured language models have it."""

    def forward(self, x):
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[None, None])
        return y.transpose(1, 2).flatten(2)


def test_a_dense_mask_may_stand_for_the_causal_one():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), Masked()).half()
        inputs = torch.empty(2, 2048, 256, dtype=torch.half)
    dense, causal = (
        pk.estimate(model, inputs, device="a100", attention=kind, software="graph").layers[1]
        for kind in ("fused", "causal")
    )
    assert dense.activation_bytes - causal.activation_bytes > 1.9 * 2048 * 2048
    assert dense.backward_seconds > 1.5 * causal.backward_seconds


def test_dropout_keeps_a_byte_per_element_on_an_accelerator():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 1024), nn.Dropout(0.5)), torch.empty(8, 8)
    layer = pk.estimate(model, inputs, device="a100").layers[1]
    assert layer.activation_bytes == 8 * 1024


def test_a_model_with_values_keeps_them_and_its_gradients(cpu):
    model, inputs = chain(), torch.randn(6, 32)
    model(inputs).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    pk.estimate(model, inputs, device=cpu, optimizer=torch.optim.AdamW)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_on_an_accelerator_recurrent_layers_keep_gates_and_states_of_every_step():
    with torch.device("meta"):
        model, inputs = nn.Sequential(Steps(nn.LSTM), nn.ReLU()), torch.empty(4, 19, 40)
    kept = pk.estimate(model, inputs, device="a100").layers[0].activation_bytes
    assert kept > 4 * 19 * (40 + 5 * 48) * 4


def test_recurrent_layers_are_few_kernels():
    with torch.device("meta"):
        model = nn.Sequential(Recurrent(), nn.Linear(128, 10))
        inputs = torch.empty(8, 64, 128)
    short, long = (
        pk.estimate(model, inputs[:, :steps], device="a100").layers[0].forward_seconds
        for steps in (8, 64)
    )
    assert long < 8 * short


def kernels_of(model, inputs, kind="cpu", attention="fused"):
    counter = KernelCounter()
    with AsOnDevice(kind, attention), counter:
        model(inputs).sum().backward()
    return Counter(kernel.name for kernel in counter.kernels), counter.kernels


def test_on_a_cpu_an_lstm_is_a_kernel_for_each_direction():
    with torch.device("meta"):
        model, inputs = Steps(nn.LSTM, num_layers=2, bidirectional=True), torch.empty(4, 19, 40)
    names, kernels = kernels_of(model, inputs)
    assert names["mkldnn_rnn_layer"] == names["mkldnn_rnn_layer_backward"] == 4
    assert names["mm"] == names["bmm"] == names["addmm"] == 0
    flops = [sum(k.flops for k in kernels if k.backward is backward) for backward in (False, True)]
    products = 2 * 4 * 19 * 4 * 48 * ((40 + 48) + (96 + 48)) * 2
    assert flops == [products, 2 * products]


def test_the_last_block_of_a_causal_attention_is_whole_on_a_cpu():
    def flops(tokens, kind):
        with torch.device("meta"):
            model, inputs = SmallBlock(64, 4, True), torch.empty(1, tokens, 64)
        return sum(k.flops for k in kernels_of(model, inputs, kind)[1] if k.kind == "attention")

    assert flops(256, "cpu") == 2 * flops(256, "gpu")
    assert 1.1 < flops(4096, "cpu") / flops(4096, "gpu") < 1.2


def test_a_softmax_of_masked_rows_is_the_kernels_that_torch_runs():
    def attention(q):
        mask = torch.ones(32, 32, dtype=torch.bool, device="meta").tril()
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.1)

    inputs = torch.empty(1, 4, 32, 16, device="meta", requires_grad=True)
    names, _ = kernels_of(attention, inputs)
    assert names["_safe_softmax"] == 0 and names["_softmax"] == names["all"] == 1


def test_few_channels_are_filled_up_but_those_of_pictures_less():
    assert [padding_of(*pair) for pair in ((16, 32), (32, 1), (32, 3), (32, 8), (10, 16))] == [
        1, 1, 8 / 3, 2, 1.6,
    ]  # fmt: skip


class Steps(nn.Module):
    """A recurrent layer whose last state nobody wants."""

    def __init__(self, kind, **options):
        super().__init__()
        self.inner = kind(40, 48, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x)[0]


def keeps_as_onednn():
    with torch.profiler.profile() as watched:
        nn.LSTM(4, 4)(torch.ones(1, 1, 4))
    return any("mkldnn_rnn_layer" in event.key for event in watched.key_averages())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False},
        {"num_layers": 2, "dropout": 0.5},
    ],
    ids=str,
)
def test_recurrent_layers_keep_what_torch_keeps_on_a_cpu(kind, options, cpu):
    if kind is nn.LSTM and not keeps_as_onednn():
        pytest.skip("torch computes no LSTM by oneDNN here")
    model, inputs = nn.Sequential(Steps(kind, **options), nn.ReLU()), torch.randn(4, 19, 40)
    estimated = pk.estimate(model, inputs, device=cpu).layers[0].activation_bytes
    measured = pk.profile(model, inputs, repeats=1, ranks=0).layers[0].activation_bytes
    assert estimated == pytest.approx(measured, rel=0.02)


def test_projected_states_are_estimated_step_by_step():
    with torch.device("meta"):
        model, inputs = nn.Sequential(Steps(nn.LSTM, proj_size=8)), torch.empty(4, 5, 40)
    assert pk.estimate(model, inputs, device="a100").layers[0].output_bytes == 4 * 5 * 8 * 4


def test_a_fused_optimizer_moves_less_than_one_in_many_kernels():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(4096, 4096)), torch.empty(2, 4096)
    fused, many = (
        pk.estimate(
            model, inputs, device="a100",
            optimizer=lambda parameters, kind=kind: torch.optim.AdamW(parameters, fused=kind),
        ).layers[0]
        for kind in (True, False)
    )  # fmt: skip
    assert 0 < fused.update_seconds < many.update_seconds
    assert fused.optimizer_bytes == many.optimizer_bytes


def test_the_loss_is_part_of_the_last_layer():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 5000))
        tokens = torch.empty(4, 64, dtype=torch.long)

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    plain = pk.estimate(model, tokens, device="a100", software="graph")
    whole = pk.estimate(model, tokens, device="a100", software="graph", loss=loss)
    assert whole.layers[1].forward_seconds > plain.layers[1].forward_seconds
    assert whole.layers[1].output_bytes == 4


def test_a_plan_of_an_estimate_says_that_it_is_one_and_what_error_to_expect():
    with torch.device("meta"):
        model = nn.Sequential(*[SmallBlock(256, 4, True) for _ in range(4)])
        inputs = torch.empty(2, 64, 256)
    graph = pk.estimate(model, inputs, device="a100")
    assert "not measured" in str(graph)
    again = pk.LayerGraph.from_json(graph.to_json())
    assert again == graph
    plan = pk.plan(graph, pk.Cluster.of("a100", devices_per_host=2), microbatches=4)
    assert any("estimated for a100-sxm-80gb" in warning for warning in plan.warnings)
    assert "expect a step to be off by about" in " ".join(str(plan).split())
    assert pk.simulate(plan).makespan > 0


def test_wherever_a_plan_of_an_estimate_is_shown_it_says_that_it_is_one(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        inputs = torch.empty(2, 64)
    graph = pk.estimate(model, inputs, device="a100")
    plan = pk.plan(graph, pk.Cluster.of("2xa100"), microbatches=4, schedule="1f1b")
    plan.save(tmp_path / "plan.json")
    assert pk.Plan.load(tmp_path / "plan.json") == plan
    mark = f"estimated for a100-sxm-80gb, ± {graph.estimate.error:.0%}"
    assert plan.estimate.mark == mark
    assert mark in explain(plan).title
    assert mark in str(plan).splitlines()[0]
    assert mark in pk.simulate(plan).name
    pk.draw(plan, tmp_path / "plan.svg")
    assert mark in (tmp_path / "plan.svg").read_text()
    assert mark in what_if("bandwidth*2", graph, pk.Cluster.of("2xa100"), microbatches=4).text(200)
    measured = plan.edited(estimate=None)
    assert "estimated" not in str(measured).splitlines()[0] + pk.simulate(measured).name


def test_a_plan_for_other_devices_than_those_of_the_estimate_says_so():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(4, 64)
    graph = pk.estimate(model, inputs, device="a100")
    said = "estimated for a100-sxm-80gb, but the cluster has h100-sxm"
    for name, is_other in (("h100", True), ("a100", False)):
        plan = pk.plan(graph, pk.Cluster.of(name, devices_per_host=2), microbatches=4)
        assert any(said in warning for warning in plan.warnings) == is_other


class GroupedExperts(nn.Module):
    """Rows of four experts, one after the other, as a mixture hands them on."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(4, width, width, dtype=dtype))

    def forward(self, rows):
        ends = torch.arange(1, 5, device=rows.device, dtype=torch.int32) * (len(rows) // 4)
        return torch._grouped_mm(rows, self.weights, offs=ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_experts_are_priced_as_the_product_of_all_rows(dtype):
    with torch.device("meta"):
        inputs = torch.empty(4096, 1024, dtype=dtype)
        experts = nn.Sequential(GroupedExperts(1024, dtype))
        dense = nn.Sequential(nn.Linear(1024, 1024, bias=False, dtype=dtype))
    mixture, plain = (
        pk.estimate(model, inputs, device="a100", software="graph") for model in (experts, dense)
    )
    assert not mixture.warnings
    ours, theirs = mixture.layers[0], plain.layers[0]
    assert ours.forward_seconds == pytest.approx(theirs.forward_seconds, rel=0.2)
    assert ours.backward_seconds == pytest.approx(theirs.backward_seconds, rel=0.5)


@pytest.mark.parametrize(
    ("call", "arguments", "flops"),
    [
        (torch.ops.aten._grouped_mm.default, ((2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (torch.ops.aten.mv.default, ((3, 4), (4,)), 24),
        (torch.ops.aten.addmv.default, ((3,), (3, 4), (4,)), 24),
        (torch.ops.aten.dot.default, ((5,), (5,)), 10),
        (torch.ops.aten.addr.default, ((3, 4), (3,), (4,)), 24),
    ],
)
def test_products_for_which_torch_has_no_formula_have_one(call, arguments, flops):
    tensors = [torch.empty(shape, device="meta") for shape in arguments]
    kernel = operations.kernel_of(call, tensors, {}, torch.empty(1, device="meta"))
    assert (kernel.kind, kernel.flops) == ("matmul", flops)


def test_a_product_without_a_formula_is_one_that_nobody_knows(monkeypatch):
    monkeypatch.delitem(operations._FLOPS, "mv")
    tensors = [torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")]
    kernel = operations.kernel_of(torch.ops.aten.mv.default, tensors, {}, tensors[1])
    assert kernel.kind == "unknown"


@pytest.mark.parametrize("transform", [torch.linalg.inv, lambda x: torch.fft.rfft(x).real])
def test_operations_of_torch_that_are_no_passes_over_bytes_are_named(transform):
    class Transform(nn.Module):
        def forward(self, x):
            return transform(x)

    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(64, 64), Transform()), torch.empty(2, 64, 64)
    (warning,) = pk.estimate(model, inputs, device="a100").warnings
    assert "linalg_inv" in warning or "fft" in warning


class Attends(nn.Module):
    """Norm and attention beside an identity, perhaps with autocast inside."""

    def __init__(self, autocasts=False):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)
        self.autocasts = autocasts

    def forward(self, x):
        narrow = torch.autocast("cpu", dtype=torch.bfloat16)
        with narrow if self.autocasts else nullcontext():
            y = self.norm(x)
            return x + self.inner(y, y, y, need_weights=False)[0]


@pytest.mark.parametrize("inside", [True, False])
def test_under_autocast_as_much_is_kept_as_the_profile_says(inside, cpu):
    model = nn.Sequential(
        nn.Linear(64, 64), Attends(inside), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)
    )
    inputs = torch.randn(2, 32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        estimated = pk.estimate(model, inputs, device=cpu)
        measured = pk.profile(model, inputs, repeats=1, ranks=0)
    for ours, theirs in zip(estimated.layers, measured.layers, strict=True):
        assert ours.activation_bytes == theirs.activation_bytes, ours.name
        assert ours.output_bytes == theirs.output_bytes, ours.name


def test_autocast_is_priced_as_narrow_products_with_casts():
    def build(dtype):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(4096, 4096, dtype=dtype) for _ in range(2)])
            return model, torch.empty(8192, 4096, dtype=dtype)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = pk.estimate(*build(torch.float32), device="a100").layers[1]
    wide, narrow = (
        pk.estimate(*build(dtype), device="a100").layers[1]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow.forward_seconds < cast.forward_seconds < 1.3 * narrow.forward_seconds
    assert cast.forward_seconds < wide.forward_seconds / 5


@pytest.mark.parametrize(
    ("func", "on_gpu", "dtype"),
    [
        (F.linear, True, torch.float16),
        (torch.ops.aten.addmm.default, False, torch.float16),
        (torch.Tensor.softmax, True, torch.float32),
        (torch.Tensor.softmax, False, None),
        (F.cross_entropy, False, torch.float32),
        (F.gelu, True, None),
    ],
)
def test_autocast_chooses_dtypes_as_torch_lists_them(func, on_gpu, dtype):
    assert autocast_dtype(func, torch.float16, on_gpu=on_gpu) == dtype


def test_attention_within_torchs_own_layer_is_fused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), Attends()).half()
        inputs = torch.empty(2, 512, 64, dtype=torch.half)
    fused, formula = (
        pk.estimate(model, inputs, device="a100", attention=kind).layers[1].activation_bytes
        for kind in ("fused", "formula")
    )
    assert formula - fused > 2 * 4 * 512 * 512 * 2


@torch.library.custom_op("penstock_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


mystery.register_fake(torch.empty_like)
mystery.register_autograd(lambda ctx, gradient: mystery(gradient))


class Mystery(nn.Module):
    def forward(self, x):
        return mystery(x)


def test_operations_that_nobody_knows_are_named_with_their_share():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 8), Mystery()), torch.empty(64, 8)
    graph = pk.estimate(model, inputs, device="a100")
    (warning,) = graph.warnings
    assert "mystery" in warning
    assert "% of all" in warning


@torch.library.custom_op("penstock_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Shapeless(nn.Module):
    def forward(self, x):
        return shapeless(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


class ScaledBackward(nn.Module):
    def forward(self, x):
        return Scaled.apply(x)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (Shapeless, "penstock_tests::shapeless has no kernel for shapes .*register_fake"),
        (ScaledBackward, r"Scaled\.backward \(test_estimating\.py, line \d+\) looks at the values"),
    ],
)
def test_code_that_needs_more_than_shapes_is_named_with_a_remedy(code, said):
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 8), code()), torch.empty(4, 8)
    with pytest.raises(pk.ModelError, match=said):
        pk.estimate(model, inputs, device="a100")


def test_a_loss_that_looks_at_values_is_named_with_a_remedy():
    model, inputs = nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8)
    said = r"the loss: .*<lambda> \(test_estimating\.py, line \d+\) looks at .*no item\(\)"
    with pytest.raises(pk.ModelError, match=said):
        pk.estimate(
            model, inputs, device="a100", targets=inputs, loss=lambda out, _: out.sum().item()
        )


def test_an_optimizer_that_wants_numbers_of_tensors_is_counted_by_its_operations(cpu):
    model, inputs = nn.Sequential(nn.Linear(8, 16)), torch.randn(4, 8)
    options = {"optimizer": torch.optim.Adafactor}
    estimated = pk.estimate(model, inputs, device=cpu, **options).layers[0]
    measured = pk.profile(model, inputs, repeats=1, ranks=0, **options).layers[0]
    assert estimated.update_seconds > 0
    assert estimated.optimizer_bytes == measured.optimizer_bytes


def test_gradients_that_an_optimizer_takes_away_are_counted(cpu):
    model = nn.Sequential(nn.Linear(16, 32))
    estimated = pk.estimate(
        model, torch.randn(4, 16), device=cpu, optimizer=KeepingGradients
    ).layers[0]
    assert estimated.summed_bytes == estimated.parameter_bytes
    assert estimated.update_seconds > 0


def test_an_optimizer_that_cannot_make_a_step_is_refused_by_its_name():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 16)), torch.empty(4, 8)
    with pytest.raises(pk.InputError, match="SparseAdam cannot update the layer of 0"):
        pk.estimate(model, inputs, device="a100", optimizer=torch.optim.SparseAdam)


class Looks(nn.Module):
    def forward(self, x):
        return x[x.sum(-1) > 0]


@pytest.mark.parametrize(
    ("model", "inputs", "options", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2, device="meta")), torch.ones(2, 2), {}, "on the meta device"),
        (chain(), torch.ones(2, 32), {"device": "gtx-9"}, "no device 'gtx-9'"),
        (chain(), torch.ones(2, 32), {"software": "eagre"}, "nearest are eager"),
        (chain(), torch.ones(2, 32), {"arithmetic": "fp8"}, "a100-sxm-80gb computes no fp8"),
        (chain(), torch.ones(2, 32), {"sizes": [3]}, "larger sample"),
        (
            nn.Sequential(Looks()),
            torch.ones(2, 32),
            {},
            r"'0' \(Looks\).*Looks\.forward \(.*values",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_sentence(model, inputs, options, said):
    with pytest.raises(pk.InputError, match=said):
        pk.estimate(model, inputs, **{"device": "a100", **options})
