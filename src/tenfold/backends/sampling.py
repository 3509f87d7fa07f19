"""How a token is drawn: the definition, in plain numpy. Every backend's own sampler must draw the same.

A draw is the argmax, over the tokens that the filters leave, of ``logit / temperature + Gumbel(seed,
position, token)``, which is a sample of their softmax (the Gumbel-max trick). The noise is a function of
three numbers and of nothing else (Philox4x32-10, a counter-based generator: J. K. Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), so a draw does not depend on what else is in the batch, and
whoever knows the seed can make it again.

Arithmetic. The uniform numbers behind the noise, and all up to and including the division by the temperature,
are float32, each operation rounded on its own (no fused multiply-add), so another implementation can be equal
to the bit. Logarithms, exponentials and sums from there on are float64 here; an implementation in float32 may
differ where two scores, or a sum and its threshold, are closer than its rounding error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import Floats, Int32s, SamplingBatch

Float64s = npt.NDArray[np.float64]
UInt32s = npt.NDArray[np.uint32]

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(counter: UInt32s, key: tuple[int, int]) -> UInt32s:
    """Philox4x32-10: four random words [n, 4] for the counters [n, 4], under a key of two words."""
    c0, c1, c2, c3 = (counter[:, lane].astype(np.uint64) for lane in range(4))
    low, shift = np.uint64(_LOW), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in PHILOX_MULTIPLIERS)
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> shift) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & _LOW, (k1 + PHILOX_WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(seed: int, position: int, tokens: npt.ArrayLike) -> Float64s:
    """The noise [n] of ``tokens`` [n] at ``position``, under a 64-bit ``seed``.

    ``position`` is the index in the sequence of the token to be drawn. Key: (seed's low word, its high word).
    Counter: (token // 4, position's low word, its high word, 0). Word ``token % 4`` of the result, x, gives
    ``v = min((float32(x) + 0.5) * 2**-32, 1 - 2**-24)``, each operation rounded to float32, and the noise
    ``-log(-log1p(-v))``: about -2.8 to 22.9. Small v make the large noise that decides a draw, and there
    floats are dense: the upper tail has the full 32 bits of x. At the other end v would round to 1, with
    noise of minus infinity, but for the limit.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    blocks, block_of = np.unique(ids >> 2, return_inverse=True)
    counter = np.zeros((len(blocks), 4), dtype=np.uint32)
    counter[:, 0] = blocks
    counter[:, 1] = position & _LOW
    counter[:, 2] = (position >> 32) & _LOW
    words = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))[block_of, ids & 3]
    v = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    noise: Float64s = -np.log(-np.log1p(-v.astype(np.float64)))
    return noise


class Draws(NamedTuple):
    """What was drawn for N rows; the arrays of a ``StepOutput``."""

    tokens: Int32s
    logprobs: Floats
    top_tokens: Int32s
    top_logprobs: Floats


def sample(logits: Floats, sampling: SamplingBatch) -> Draws:
    """Draws one token for each row of ``logits`` [N, vocab]. Neither argument is changed.

    A row without a logit above -inf (all NaN, or all forbidden) draws -1. Raises ValueError where the two do
    not have the same number of rows.
    """
    rows = len(logits)
    if len(sampling.temperature) != rows:
        raise ValueError(f"{rows} rows of logits, but {len(sampling.temperature)} entries in SamplingBatch")
    widest = max(0, int(sampling.logprobs.max(initial=-1)))
    tokens = np.zeros(rows, np.int32)
    logprobs = np.zeros(rows, np.float32)
    top_tokens = np.full((rows, widest), -1, np.int32)
    top_logprobs = np.zeros((rows, widest), np.float32)
    for n in range(rows):
        row = adjusted(logits[n], sampling, n)
        tokens[n] = _draw(row, sampling, n) if np.any(row > -np.inf) else -1
        if sampling.logprobs[n] >= 0:
            own = log_softmax(logits[n])
            logprobs[n] = own[tokens[n]] if tokens[n] >= 0 else np.nan
            best = by_rank(logits[n])[: sampling.logprobs[n]]
            top_tokens[n, : len(best)] = best
            top_logprobs[n, : len(best)] = own[best]
    return Draws(tokens, logprobs, top_tokens, top_logprobs)


def by_rank(logits: Floats) -> npt.NDArray[np.int64]:
    """All token ids, most likely first, equal ones in order of id."""
    return np.argsort(-logits, kind="stable")


def log_softmax(logits: Floats) -> Float64s:
    """Log-probabilities [vocab] of raw logits."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Float64s = shifted - np.log(np.exp(shifted).sum())
    return result


def adjusted(logits: Floats, sampling: SamplingBatch, n: int) -> Floats:
    """A row's logits [vocab] after bias, penalties and mask (a copy)."""
    row = logits.astype(np.float32, copy=True)
    bias = slice(sampling.bias_offsets[n], sampling.bias_offsets[n + 1])
    # One at a time: a token named twice gets both.
    np.add.at(row, sampling.bias_tokens[bias], sampling.bias_values[bias])
    history = slice(sampling.history_offsets[n], sampling.history_offsets[n + 1])
    seen = sampling.history_tokens[history]
    counts = sampling.history_counts[history].astype(np.float32)
    values = row[seen]
    repetition = sampling.repetition[n]
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - sampling.frequency[n] * counts
    values = np.where(counts > 0, values - sampling.presence[n], values)
    row[seen] = values
    allowed = mask_of(sampling, n, len(row))
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def mask_of(sampling: SamplingBatch, n: int, vocab: int) -> npt.NDArray[np.bool_] | None:
    """[vocab] which tokens row ``n`` may draw; None: all."""
    if sampling.mask_rows is None or sampling.masks is None or sampling.mask_rows[n] < 0:
        return None
    words = sampling.masks[sampling.mask_rows[n]].astype("<u4")
    return np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").astype(bool)


def kept(logits: Floats, sampling: SamplingBatch, n: int) -> npt.NDArray[np.int64]:
    """Ids that row ``n``'s filters leave of its adjusted logits, most likely first; at least one."""
    ids = by_rank(logits)
    if sampling.top_k[n] > 0:
        ids = ids[: sampling.top_k[n]]
    scaled = logits[ids] / sampling.temperature[n]
    weights = np.exp(scaled.astype(np.float64) - float(scaled[0]))
    if sampling.top_p[n] < 1:
        sums = np.cumsum(weights)
        last = np.searchsorted(sums, float(sampling.top_p[n]) * sums[-1])
        ids, weights = ids[: last + 1], weights[: last + 1]
    left: npt.NDArray[np.int64] = ids[weights >= float(sampling.min_p[n])]
    return left


def _draw(logits: Floats, sampling: SamplingBatch, n: int) -> int:
    if sampling.temperature[n] == 0:
        return int(np.argmax(logits))
    ids = np.sort(kept(logits, sampling, n))
    scores = (logits[ids] / sampling.temperature[n]).astype(np.float64)
    scores += gumbel(int(sampling.seed[n]), int(sampling.position[n]), ids)
    return int(ids[np.argmax(scores)])
