import pytest
from msgspec.structs import replace

from penstock import Layer, LayerGraph
from penstock.base.errors import InputError

LAYER = Layer(
    name="a",
    forward_seconds=1,
    backward_input_seconds=2,
    backward_weight_seconds=4,
    signature="weight 2x2 float32",
)


def test_sums_of_a_layer():
    assert LAYER.backward_seconds == 6
    assert LAYER.compute_seconds == 7


@pytest.mark.parametrize("field", ["forward_seconds", "update_seconds", "activation_bytes"])
@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_a_cost_is_not_negative(field, bad):
    with pytest.raises(InputError, match=f"layer 'a': {field} is .*(≥ 0|`int`)"):
        replace(LAYER, **{field: bad})


def test_a_graph_has_layers_with_names_of_their_own():
    with pytest.raises(InputError, match="at least one layer"):
        LayerGraph(layers=())
    with pytest.raises(InputError, match="a repeat"):
        LayerGraph(layers=(LAYER, LAYER))
    with pytest.raises(InputError, match="microbatch_size is 0"):
        LayerGraph(layers=(LAYER,), microbatch_size=0)


def test_the_fingerprint_tells_architectures_apart_and_nothing_else():
    graph = LayerGraph(layers=(LAYER,))
    slower = LayerGraph(layers=(replace(LAYER, forward_seconds=9),), device="elsewhere")
    assert graph.fingerprint == slower.fingerprint
    assert len(graph.fingerprint) == 16
    for other in (replace(LAYER, name="b"), replace(LAYER, signature="weight 3x2 float32")):
        assert LayerGraph(layers=(other,)).fingerprint != graph.fingerprint


@pytest.mark.parametrize(
    "field",
    [
        "input_bytes",
        "hop_seconds",
        "op_seconds",
        "sum_bytes_per_second",
        "moved_bytes_per_second",
        "new_bytes_per_second",
    ],
)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_overheads_are_not_negative_and_finite(field, value):
    with pytest.raises(InputError, match=rf"{field} is {value}(\.0)?, (but must be ≥ 0|which it)"):
        LayerGraph(layers=(LAYER,), **{field: value})


def block(name, **fields):
    return replace(LAYER, name=name, signature=f"{name}.weight:2x2:float32", **fields)


def twin(num_blocks):
    """An embedding, blocks of two layers that read the embedding, too, and a head."""
    layers = [block("words")]
    for index in range(num_blocks):
        last = layers[-1].name
        first, second = (f"net.layers.{index}.{part}" for part in ("in", "out"))
        layers += [block(first, inputs=(last,), after=("words",), unit=first)]
        layers += [block(second, inputs=(first,), unit=first)]
    layers += [block("net.layers_norm", inputs=(layers[-1].name,))]
    return LayerGraph(layers=tuple(layers))


def test_a_deep_model_has_the_profile_of_its_twin_block_by_block():
    for shallow in (2, 3):
        assert twin(shallow).with_blocks("net.layers", 12) == twin(12)
        assert twin(shallow).with_blocks("net.layers", shallow) == twin(shallow)
    sizes = replace(twin(2), other_sizes=(replace(twin(2), microbatch_size=2),))
    (other,) = sizes.with_blocks("net.layers", 5).other_sizes
    assert other == replace(twin(5), microbatch_size=2)


def test_blocks_that_are_not_there_are_refused():
    for name in ("layers", "net", "net.layers.0"):
        with pytest.raises(InputError, match="no list of two or more blocks"):
            twin(3).with_blocks(name, 5)
    with pytest.raises(InputError, match="no list of two or more blocks"):
        twin(1).with_blocks("net.layers", 5)
    with pytest.raises(InputError, match="count is 2, but must be ≥ 3"):
        twin(3).with_blocks("net.layers", 2)
