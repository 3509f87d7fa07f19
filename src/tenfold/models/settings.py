"""Reading a config.json: typed, with the family's defaults, and errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (),
    "is_causal": (True,),
    "logits_scaling": (),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
"""Keys that would change what a model computes and that no family implements, with their harmless values."""


class Settings:
    """A model's config.json with the defaults of its family. All errors are ValueErrors that name the key."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults
        self.family = str(values.get("model_type"))
        for key, harmless in UNSUPPORTED.items():
            self.only(key, *harmless)

    def get(self, key: str) -> Any:
        """The value, or the family's default where the key is absent; None for neither."""
        return self._values.get(key, self._defaults.get(key))

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses every value but ``allowed``, absent and null."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"{self.family}: {key} = {value!r} is not supported")

    def size(self, key: str, otherwise: int | None = None) -> int:
        """A positive integer; ``otherwise`` stands for an absent key or null."""
        value = self.get(key)
        if value is None:
            value = otherwise
        if value is None:
            raise ValueError(f"{self.family}: the configuration has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{self.family}: {key} must be a positive integer, is {value!r}")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        return positive_number(self.family, key, self.get(key))

    def flag(self, key: str) -> bool:
        """A boolean; absent without a default means False."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValueError(f"{self.family}: {key} must be true or false, is {value!r}")
        return value

    def layer_windows(self, layers: int, window: int, fallback: tuple[bool, ...]) -> tuple[int, ...]:
        """Each layer's window (0: none): ``window`` where ``layer_types`` or else ``fallback`` says so."""
        types = self.get("layer_types")
        sliding = fallback
        if types is not None:
            known = {"full_attention": False, "sliding_attention": True}
            if not isinstance(types, list) or len(types) != layers:
                raise ValueError(f"{self.family}: layer_types must list a type for each of {layers} layers")
            if strange := [kind for kind in types if kind not in known]:
                raise ValueError(f"{self.family}: layer_types has {strange[0]!r}, which is not supported")
            sliding = tuple(known[kind] for kind in types)
        if any(sliding) and not window:
            raise ValueError(f"{self.family}: layer_types has sliding layers but there is no sliding_window")
        return tuple(window if slides else 0 for slides in sliding)


def positive_number(family: str, key: str, value: Any) -> float:
    """``value`` as a float, if it is a positive number; else a ValueError that names ``key``."""
    if value is None:
        raise ValueError(f"{family}: the configuration has no {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{family}: {key} must be a positive number, is {value!r}")
    return float(value)
