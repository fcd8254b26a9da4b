"""Models by their published shapes, for tests of tensor splits."""

from __future__ import annotations

from penstock.core.graph import Layer, LayerGraph

# (kind, forward ms, backward ms, output bytes, parameter bytes) at 256 rows, as PipeDream measured
# it (its profile of AlexNet, on a V100).
_ALEXNET = (
    ("Conv2d", 22.316, 6.405, 198246400, 93184),
    ("ReLU", 0.813, 0.733, 198246400, 0),
    ("MaxPool2d", 0.756, 1.148, 47775744, 0),
    ("Conv2d", 3.128, 5.612, 143327232, 1229568),
    ("ReLU", 0.811, 0.524, 143327232, 0),
    ("MaxPool2d", 0.579, 0.861, 33226752, 0),
    ("Conv2d", 3.260, 6.610, 66453504, 2655744),
    ("ReLU", 0.427, 0.269, 66453504, 0),
    ("Conv2d", 4.423, 7.197, 44302336, 3539968),
    ("ReLU", 0.539, 0.188, 44302336, 0),
    ("Conv2d", 2.815, 5.497, 44302336, 2360320),
    ("ReLU", 0.524, 0.176, 44302336, 0),
    ("MaxPool2d", 0.391, 0.306, 9437184, 0),
    ("View", 0.0, 0.0, 9437184, 0),
    ("Dropout", 0.0, 0.0, 9437184, 0),
    ("Linear", 1.737, 3.072, 4194304, 151011328),
    ("ReLU", 0.471, 0.039, 4194304, 0),
    ("Dropout", 0.0, 0.0, 4194304, 0),
    ("Linear", 1.075, 1.366, 4194304, 67125248),
    ("ReLU", 0.283, 0.043, 4194304, 0),
    ("Linear", 0.453, 0.474, 1024000, 16388000),
)


def alexnet() -> LayerGraph:
    """256 rows, as PipeDream measured them."""
    layers = (
        Layer(
            name=f"{index}-{kind}",
            kind=kind,
            forward_seconds=forward / 1e3,
            backward_input_seconds=backward / 2e3,
            backward_weight_seconds=backward / 2e3,
            activation_bytes=output,
            output_bytes=output,
            parameter_bytes=parameters,
        )
        for index, (kind, forward, backward, output, parameters) in enumerate(_ALEXNET)
    )
    return LayerGraph(layers=tuple(layers), microbatch_size=256)


class _Builder:
    """Layers from shapes: times from operations at a rate, bytes from float32."""

    def __init__(self, rows: int, operations_per_second: float) -> None:
        self.rows = rows
        self.rate = operations_per_second
        self.layers: list[Layer] = []

    def add(
        self,
        name: str,
        kind: str,
        features: int,
        *,
        operations: float = 0.0,
        parameters: int = 0,
        inputs: tuple[str, ...] | None = None,
    ) -> None:
        output = 4 * self.rows * features
        seconds = (operations or 2 * features) * self.rows / self.rate
        self.layers.append(
            Layer(
                name=name,
                kind=kind,
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds if parameters else 0.0,
                activation_bytes=output,
                output_bytes=output,
                parameter_bytes=4 * parameters,
                optimizer_bytes=8 * parameters,
                inputs=inputs,
            )
        )

    def graph(self) -> LayerGraph:
        return LayerGraph(layers=tuple(self.layers), microbatch_size=self.rows)


def vgg16(rows: int = 64) -> LayerGraph:
    """VGG-16 by its shapes (Simonyan and Zisserman, arXiv 1409.1556, table 1, column D)."""
    build = _Builder(rows, 10e12)
    side, channels, number = 224, 3, 0
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            weights = 9 * channels * width
            build.add(
                f"conv{number}",
                "Conv2d",
                width * side**2,
                operations=2 * weights * side**2,
                parameters=weights + width,
            )
            build.add(f"relu{number}", "ReLU", width * side**2)
            channels, number = width, number + 1
        side //= 2
        build.add(f"pool{number}", "MaxPool2d", channels * side**2)
    inputs = channels * side**2
    for index, outputs in enumerate((4096, 4096, 1000)):
        weights = inputs * outputs
        build.add(
            f"fc{index}", "Linear", outputs, operations=2 * weights, parameters=weights + outputs
        )
        if index < 2:
            build.add(f"fc_relu{index}", "ReLU", outputs)
        inputs = outputs
    return build.graph()


def transformer(hidden: int, length: int, rows: int, *, num_blocks: int = 1) -> LayerGraph:
    """Blocks as in GPT-2, layer by layer; layer norms first, residual sums as layers."""
    build = _Builder(rows, 100e12)
    before = ""
    for block in range(num_blocks):
        before = _add_block(build, f"{block}.", before, hidden, length)
    return build.graph()


def _add_block(build: _Builder, prefix: str, before: str, hidden: int, length: int) -> str:
    def linear(name: str, width: int, outputs: int) -> None:
        weights = width * outputs
        build.add(
            prefix + name,
            "Linear",
            outputs * length,
            operations=2 * weights * length,
            parameters=weights + outputs,
        )

    # The sums read the block's input, which needs a layer that makes it.
    if not before:
        before = f"{prefix}input"
        build.add(before, "Embedding", hidden * length, parameters=1000 * hidden)
    norm = 2 * hidden
    build.add(f"{prefix}norm1", "LayerNorm", hidden * length, parameters=norm)
    linear("qkv", hidden, 3 * hidden)
    build.add(
        f"{prefix}attention",
        "ScaledDotProductAttention",
        hidden * length,
        operations=4 * hidden * length**2,
    )
    linear("projection", hidden, hidden)
    build.add(f"{prefix}add1", "Add", hidden * length, inputs=(before, f"{prefix}projection"))
    build.add(f"{prefix}norm2", "LayerNorm", hidden * length, parameters=norm)
    linear("fc1", hidden, 4 * hidden)
    build.add(f"{prefix}gelu", "GELU", 4 * hidden * length)
    linear("fc2", 4 * hidden, hidden)
    build.add(f"{prefix}add2", "Add", hidden * length, inputs=(f"{prefix}add1", f"{prefix}fc2"))
    return f"{prefix}add2"
