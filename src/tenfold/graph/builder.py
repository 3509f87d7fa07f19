"""The builder that model files use: one method an op; it names values, tracks widths and checks shapes.

A value is named after the weight that makes it ("model.layers.0.self_attn.q_proj") or after its kind and
place.
"""

from __future__ import annotations

from typing import Literal

from tenfold.graph.graph import Graph
from tenfold.graph.ops import (
    Add,
    AnyOp,
    Attention,
    Concat,
    Embed,
    Gate,
    Input,
    KVSpec,
    Linear,
    RMSNorm,
    Rope,
    RopeScaling,
    Scale,
    SelectRows,
    Softcap,
    WeightSpec,
)
from tenfold.graph.validate import GraphError, output_width, validate


class GraphBuilder:
    """Collects ops. Each method returns the value's name; shapes that do not fit raise GraphError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ops: list[AnyOp] = []
        self._widths: dict[str, int] = {}
        self._kv: list[KVSpec] = []
        self._layers: list[str] = []

    def width(self, value: str) -> int:
        """Width in elements of a value made before."""
        if value not in self._widths:
            raise GraphError(f"no value {value!r} was made before")
        return self._widths[value]

    def embed(self, weight: str, vocab_size: int, width: int, scale: float = 1.0) -> str:
        """``weight[token] * scale``."""
        spec = WeightSpec(weight, (vocab_size, width))
        return self._append(Embed(output=self._value(weight), weight=spec, scale=scale))

    def input(self, name: str, width: int) -> str:
        """A value that the caller hands in with each step, under this name."""
        return self._append(Input(output=name, width=width))

    def concat(self, *values: str) -> str:
        """The values side by side."""
        return self._append(Concat(inputs=values, output=self._value("concat")))

    def linear(self, x: str, weight: str, out: int, bias: str | None = None) -> str:
        """``x @ weight.T + bias``; the weight is ``[out, width of x]``."""
        return self._append(
            Linear(
                inputs=(x,),
                output=self._value(weight),
                weight=WeightSpec(weight, (out, self.width(x))),
                bias=None if bias is None else WeightSpec(bias, (out,)),
            )
        )

    def rms_norm(self, x: str, weight: str, eps: float, width: int = 0, weight_offset: float = 0.0) -> str:
        """RMS norm over each stretch of ``width`` elements; 0 means the whole row."""
        width = width or self.width(x)
        return self._append(
            RMSNorm(
                inputs=(x,),
                output=self._value(weight),
                weight=WeightSpec(weight, (width,)),
                eps=eps,
                width=width,
                weight_offset=weight_offset,
            )
        )

    def rope(
        self, x: str, head_dim: int, theta: float, scaling: RopeScaling | None = None, rotary_dim: int = 0
    ) -> str:
        """Rotary embedding over the first ``rotary_dim`` elements of each head; 0 means all of them."""
        return self._append(
            Rope(
                inputs=(x,),
                output=self._value("rope"),
                heads=self.width(x) // head_dim,
                head_dim=head_dim,
                rotary_dim=rotary_dim or head_dim,
                theta=theta,
                scaling=scaling or RopeScaling(),
            )
        )

    def attention(
        self, q: str, k: str, v: str, *, head_dim: int, scale: float, window: int = 0, softcap: float = 0.0
    ) -> str:
        """Causal attention; becomes the next KV layer. Head counts follow from the widths of q and k."""
        kv = KVSpec(layer=len(self._kv), heads=self.width(k) // head_dim, head_dim=head_dim, window=window)
        value = self._append(
            Attention(
                inputs=(q, k, v),
                output=self._value("attention"),
                kv=kv,
                heads=self.width(q) // head_dim,
                scale=scale,
                softcap=softcap,
            )
        )
        self._kv.append(kv)
        return value

    def add(self, a: str, b: str) -> str:
        """``a + b``."""
        return self._append(Add(inputs=(a, b), output=self._value("add")))

    def gate(self, a: str, b: str, activation: Literal["silu", "gelu"]) -> str:
        """``activation(a) * b``."""
        return self._append(Gate(inputs=(a, b), output=self._value("gate"), activation=activation))

    def scale(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self._append(Scale(inputs=(x,), output=self._value("scale"), factor=factor))

    def softcap(self, x: str, cap: float) -> str:
        """``cap * tanh(x / cap)``."""
        return self._append(Softcap(inputs=(x,), output=self._value("softcap"), cap=cap))

    def select_rows(self, x: str) -> str:
        """The rows whose logits are wanted."""
        return self._append(SelectRows(inputs=(x,), output=self._value("select_rows")))

    def end_layer(self, x: str) -> str:
        """Notes ``x`` as the residual stream after a layer (`Graph.layer_outputs`), and returns it."""
        self.width(x)
        self._layers.append(x)
        return x

    def build(self, *, hidden_size: int, vocab_size: int, max_context: int) -> Graph:
        """The finished, validated graph. Its logits are the last value made."""
        graph = Graph(
            name=self._name,
            ops=tuple(self._ops),
            widths=dict(self._widths),
            kv=tuple(self._kv),
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_context=max_context,
            layer_outputs=tuple(self._layers),
        )
        validate(graph)
        return graph

    def _append(self, op: AnyOp) -> str:
        self._widths[op.output] = output_width(op, self._widths)
        self._ops.append(op)
        return op.output

    def _value(self, stem: str) -> str:
        """A new name."""
        name = stem.removesuffix(".weight")
        return name if "." in name and name not in self._widths else f"{name}.{len(self._ops)}"
