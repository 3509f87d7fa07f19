"""How long a worker takes, in seconds: the measured curves that routing weighs and simulation runs on.

A step computes prompt tokens (at most ``chunk_tokens`` of them) and one token for every decoding sequence::

    prefill(n)    = prefill_step + prefill_token n + prefill_token2 n^2              n prompt tokens, n > 0
    decode(b, a)  = decode_step + decode_row b + decode_context a + decode_context2 a^2     b > 0 sequences
                    with a rows of context together

and takes the sum of both. The form is that of the timing model of NVIDIA Dynamo's mocker, with a term for
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class WorkerTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of a worker's cost curves; all in seconds."""

    chunk_tokens: int = 512
    """Most prompt tokens of a step."""
    prefill_step: float
    prefill_token: float
    prefill_token2: float = 0.0
    decode_step: float
    decode_row: float = 0.0
    decode_context: float = 0.0
    decode_context2: float = 0.0

    def chunk(self, tokens: float) -> float:
        """Seconds that a step's ``tokens`` prompt tokens take; 0 without any."""
        if tokens <= 0:
            return 0.0
        return self.prefill_step + (self.prefill_token + self.prefill_token2 * tokens) * tokens

    def decode(self, rows: float, context: float) -> float:
        """Seconds that one token for each of ``rows`` sequences takes; 0 without any."""
        if rows <= 0:
            return 0.0
        return (
            self.decode_step
            + self.decode_row * rows
            + (self.decode_context + self.decode_context2 * context) * context
        )

    def chunks(self, tokens: Floats) -> tuple[Floats, Floats]:
        """Elementwise: seconds to prefill ``tokens``, alone and in full chunks, and the number of steps."""
        full = np.floor(tokens / self.chunk_tokens)
        rest = tokens - full * self.chunk_tokens
        part = rest > 0
        seconds = full * self.chunk(self.chunk_tokens) + np.where(
            part, self.prefill_step + (self.prefill_token + self.prefill_token2 * rest) * rest, 0.0
        )
        return seconds, full + part

    @property
    def token_seconds(self) -> float:
        """Seconds per prompt token in a full chunk."""
        return self.chunk(self.chunk_tokens) / self.chunk_tokens


def mocker_timing(total_tokens: int) -> WorkerTiming:
    """The built-in timing of Dynamo's mocker (ai-dynamo-runtime 1.6.1) for a worker whose cache holds
    ``total_tokens``: measured by replaying single requests, and exact to a nanosecond."""
    return WorkerTiming(
        chunk_tokens=8192,
        prefill_step=16.50142e-3,
        prefill_token=1.518344e-5,
        prefill_token2=4.209989e-10,
        decode_step=5.74e-3,
        decode_context=54.01e-3 / total_tokens,
        decode_context2=-25.74e-3 / total_tokens**2,
    )


def fit_timing(
    chunk_tokens: int,
    prefills: Sequence[tuple[int, float]],
    decodes: Sequence[tuple[int, int, float]],
) -> WorkerTiming:
    """Curves from measurements: (prompt tokens of a step, seconds), and (rows, context rows together,
    seconds) of decoding steps. Least squares of the relative error, no coefficient below zero: one that
    would be is left out and the others are fitted again.

    Raises ValueError without at least one measurement of each kind.
    """
    if not prefills or not decodes:
        raise ValueError("timing needs at least one measured prefill step and one measured decode step")
    n = np.array(prefills, np.float64)
    d = np.array(decodes, np.float64)
    prefill = _fit(np.stack([np.ones(len(n)), n[:, 0], n[:, 0] ** 2], 1), n[:, 1])
    decode = _fit(np.stack([np.ones(len(d)), d[:, 0], d[:, 1]], 1), d[:, 2])
    return WorkerTiming(
        chunk_tokens=chunk_tokens,
        prefill_step=prefill[0],
        prefill_token=prefill[1],
        prefill_token2=prefill[2],
        decode_step=decode[0],
        decode_row=decode[1],
        decode_context=decode[2],
    )


def _fit(terms: Floats, seconds: Floats) -> list[float]:
    used = list(range(terms.shape[1]))
    while True:
        scale = np.abs(terms[:, used]).max(0)
        rows = terms[:, used] / scale / seconds[:, None]
        found = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0] / scale
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(used) == 1:
            break
        del used[worst]
    coefficients = [0.0] * terms.shape[1]
    for place, value in zip(used, found, strict=True):
        coefficients[place] = max(0.0, float(value))
    return coefficients
