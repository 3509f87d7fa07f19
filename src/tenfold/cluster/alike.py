"""Only workers whose answers are the same are in one cluster: its namespace says which those are.

Dynamo's front takes every worker of its namespace for as good as the others. So what answers depend on is in
the namespace: ``NAME-FORMAT-KVFORMAT-MODEL-CODE``, with digests of the model's files and of Tenfold. No front
ever sees a worker that differs, and a worker can tell from the namespace alone that it would not be seen.
"""

from __future__ import annotations

import re
from pathlib import Path

from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.config import FORMATS, KV_FORMATS
from tenfold.protocol import EngineSettings
from tenfold.worker.version import code_digest

_DIGITS = 8
_FULL = re.compile(
    rf"(?P<name>.+)-(?P<format>{'|'.join(FORMATS)})-(?P<kv_format>{'|'.join(KV_FORMATS)})"
    rf"-(?P<model>[0-9a-f]{{{_DIGITS}}})-(?P<code>[0-9a-f]{{{_DIGITS}}})"
)


def full_namespace(name: str, settings: EngineSettings) -> str:
    """Of the workers that answer as one with these settings would, in a cluster called ``name`` (or by its
    full namespace). Reads the model's files. Raises OSError."""
    if found := _FULL.fullmatch(name):
        name = found["name"]
    model, code = fingerprint(Path(settings.model))[:_DIGITS], code_digest()[:_DIGITS]
    return f"{name}-{settings.format}-{settings.kv_format}-{model}-{code}"


def check_alike(namespace: str, settings: EngineSettings) -> bool:
    """Whether a worker with these settings is known to answer as the others of a namespace do; False: that is
    not a full one, and nothing is known. Raises ValueError, with the remedy, where it does not; OSError."""
    if (others := _FULL.fullmatch(namespace)) is None:
        return False
    ours = _FULL.fullmatch(full_namespace(namespace, settings))
    assert ours is not None
    for part, what, remedy in (
        ("code", "Tenfold", "install the same on both"),
        ("model", "model", "give both the same files"),
        ("format", "--format", "start both with the same"),
        ("kv_format", "--kv-format", "start both with the same"),
    ):
        if ours[part] != others[part]:
            raise ValueError(
                f"this worker would not answer as those of the cluster {others['name']} do: its {what} is "
                f"{ours[part]}, theirs {others[part]} (namespace {namespace}); {remedy}"
            )
    return True
