"""What pages are called between processes: names that any router can compute from tokens.

A page's own hash is XXH3-64 over its tokens as little-endian unsigned 32-bit integers, seed 1337. A page's
name is the hash of everything up to its end: the first page's name is its own hash, every later one is
XXH3-64 (same seed) over (name of the page before it, its own hash) as two little-endian unsigned 64-bit
integers. This is how NVIDIA Dynamo's KV router names blocks, so routers that read its names read ours.

Names find candidates, they prove nothing: a worker compares the tokens themselves before it shares a page, so
two prompts with one name cost a misrouted request and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import numpy as np
import xxhash

SEED = 1337

_PAIR = Struct("<QQ")


def page_hashes(tokens: Sequence[int], page_tokens: int) -> list[int]:
    """The own hash of every full page of ``tokens``. What fills no page at the end has no hash."""
    if page_tokens < 1:
        raise ValueError(f"page_tokens must be at least 1, not {page_tokens}")
    data = np.asarray(tokens, dtype="<u4").tobytes()
    size = 4 * page_tokens
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[at : at + size], SEED) for at in range(0, len(data) - size + 1, size)]


def chain(hashes: Sequence[int], parent: int | None = None) -> tuple[int, ...]:
    """Names of consecutive pages with these own hashes, the first after the page named ``parent``."""
    names: list[int] = []
    digest = xxhash.xxh3_64_intdigest
    pack = _PAIR.pack
    for own in hashes:
        parent = own if parent is None else digest(pack(parent, own), SEED)
        names.append(parent)
    return tuple(names)


def namespace_parent(namespace: str) -> int | None:
    """What the first page of a namespace follows: nothing in the common one. Equal tokens of two namespaces
    get different names."""
    return xxhash.xxh3_64_intdigest(namespace.encode(), SEED) if namespace else None


def page_names(tokens: Sequence[int], page_tokens: int, namespace: str = "") -> tuple[int, ...]:
    """Names of the full pages of a prompt, in order."""
    return chain(page_hashes(tokens, page_tokens), namespace_parent(namespace))
