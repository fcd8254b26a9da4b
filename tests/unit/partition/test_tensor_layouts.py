"""What collectives cost a group, and that every way to share a layer computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.cluster import Link
from penstock.core.graph import Layer
from penstock.planning.partition.tensor_layouts import DeviceRing, ways


def layer(kind):
    return Layer(
        name="a",
        kind=kind,
        forward_seconds=1.0,
        backward_input_seconds=1.0,
        backward_weight_seconds=1.0,
        parameter_bytes=8,
    )


def test_bytes_are_those_of_the_reference():
    """REFERENCE section 4: 2(t-1)/t·|w| by data; b·C_in twice by outputs, 2·b·C_out by inputs."""
    ring = DeviceRing(4, Link(bytes_per_second=1.0), 8)
    part = 3 / 4
    assert ring.all_reduce(100.0).num_bytes == 2 * part * 100
    assert ring.convert("rows", "whole", 100.0).num_bytes == part * 100
    assert ring.convert("features", "whole", 100.0).num_bytes == part * 100
    assert ring.convert("partial", "rows", 100.0).num_bytes == part * 100
    assert ring.convert("partial", "features", 100.0).num_bytes == part * 100
    assert ring.convert("partial", "whole", 100.0).num_bytes == 2 * part * 100
    assert ring.convert("rows", "features", 100.0).num_bytes == part * 100 / 4
    assert ring.convert("whole", "rows", 100.0).num_bytes == 0
    assert ring.convert("whole", "features", 100.0).num_bytes == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_latency_counts_once_a_step_of_the_ring(ranks):
    ring = DeviceRing(ranks, Link(latency_seconds=1.0), 24)
    assert ring.all_reduce(100.0).seconds == 2 * (ranks - 1)
    assert ring.convert("rows", "whole", 100.0).seconds == ranks - 1
    assert ring.convert("partial", "features", 100.0).seconds == ranks - 1
    assert ring.convert("rows", "whole", 0.0).seconds == 0


@pytest.mark.parametrize(("rows", "part"), [(8, 2), (9, 3), (4, 1), (3, 1), (1, 1)])
def test_the_busiest_device_has_the_most_rows(rows, part):
    ring = DeviceRing(4, Link(), rows)
    assert ring.share("rows") == part / rows
    assert ring.convert("rows", "whole", 100.0).num_bytes <= 100


# That the ways are right: the arithmetic of every one, device by device.


def pieces(value, layout, ranks):
    if layout == "rows":
        return np.split(value, ranks, axis=0)
    return np.split(value, ranks, axis=1) if layout == "features" else [value] * ranks


def put_together(parts, held):
    if held == "partial":
        return sum(parts)
    if held == "whole":
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    return np.concatenate(parts, axis=0 if held == "rows" else 1)


@pytest.mark.parametrize("way", ways(layer("Linear")), ids=str)
def test_a_divided_linear_layer_computes_the_same(way):
    ranks, random = 4, np.random.default_rng(0)
    inputs, weights, errors = (
        random.integers(-9, 9, shape).astype(float) for shape in ((8, 12), (12, 16), (8, 16))
    )
    if way.divides == "features":
        parts = np.split(weights, ranks, axis=1 if way.split == "column" else 0)
    else:
        parts = [weights] * ranks
    read = pieces(inputs, way.reads, ranks)
    # A row layer's terms are added up before they become its output.
    row = way.split == "row"
    given = [one @ part for one, part in zip(read, parts, strict=True)]
    assert np.array_equal(put_together(given, "partial" if row else way.gives), inputs @ weights)
    back = pieces(errors, "whole" if row else way.gives, ranks)
    returned = [error @ part.T for error, part in zip(back, parts, strict=True)]
    assert np.array_equal(put_together(returned, way.returns), errors @ weights.T)
    gradients = [one.T @ error for one, error in zip(read, back, strict=True)]
    if way.divides == "rows":
        assert np.array_equal(sum(gradients), inputs.T @ errors)
    else:  # nothing is left to add up
        axis = 1 if way.split == "column" else 0
        joined = np.concatenate(gradients, axis) if way.divides == "features" else gradients[0]
        assert np.array_equal(joined, inputs.T @ errors)


@pytest.mark.parametrize("way", ways(layer("Embedding")), ids=str)
def test_a_divided_embedding_looks_up_the_same(way):
    ranks, random = 4, np.random.default_rng(0)
    tokens = random.integers(0, 12, (8, 1))
    table = random.integers(-9, 9, (12, 16)).astype(float)
    given = []
    for rank, read in enumerate(pieces(tokens, way.reads, ranks)):
        mine = table
        if way.split == "row":  # what is not in its part of the vocabulary counts as zero
            mine = np.zeros_like(table)
            mine[3 * rank : 3 * rank + 3] = table[3 * rank : 3 * rank + 3]
        elif way.split == "column":
            mine = np.split(table, ranks, axis=1)[rank]
        given.append(mine[read[:, 0]])
    held = "partial" if way.split == "row" else way.gives
    assert np.array_equal(put_together(given, held), table[tokens[:, 0]])
