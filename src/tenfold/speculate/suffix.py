"""A drafter without training: it looks up where the newest tokens stood before, and copies on from there.

Two places are searched: the request itself (prompt and output so far), and the finished requests of its
namespace. Every match votes for the token that followed it, with the cube of its length; shorter contexts are
asked only while longer ones have few matches. The guess is taken from the source whose vote is likelier to be
right, judged by how often such votes (source, what the other source says, length of the match, share of the
votes) were right before; then the next token is guessed in the same way, until too little would survive.

Sources: prompt lookup and suffix decoding (Oliaro et al., 2024, arXiv:2411.04975) for the idea; backing off
to shorter contexts as in PPM (Cleary and Witten, 1984); the index is that of LZ77 compressors, a ring with
hash chains, in ``native/suffix.h``. Who owns what: the drafter owns the index of finished traffic and one
index for each running sequence, which ends with it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tenfold._native import SuffixRecord, SuffixText, SuffixTraffic
from tenfold.protocol import SamplingParams
from tenfold.speculate.base import NO_DRAFT, Draft, DraftSequence
from tenfold.speculate.suffix_prior import prior

MAX_NAMESPACES = 1024
"""The least recently learnt from is forgotten beyond that."""
MAX_REQUEST_TOKENS = 1 << 17
"""A sequence's own index holds so many of its newest tokens; 48 bytes each, up to twice that to grow into."""
FLOOR = 0.05
"""A draft ends where it would survive more seldom than this."""
_LEVELS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.92)
_NO_SCOPE = 0


class _Namespace(NamedTuple):
    scope: int
    greedy: SuffixRecord
    sampled: SuffixRecord
    """Apart, because a drawn token is harder to guess than the likeliest."""

    def record(self, params: SamplingParams) -> SuffixRecord:
        return self.sampled if params.temperature > 0 else self.greedy


class _Running:
    def __init__(self, tokens: int) -> None:
        self.text = SuffixText(tokens + tokens // 4 + 256, MAX_REQUEST_TOKENS)
        self.seen = 0

    def catch_up(self, tokens: list[int]) -> None:
        if len(tokens) > self.seen:
            self.text.extend(tokens[self.seen :])
            self.seen = len(tokens)


class SuffixDrafter:
    """A `speculate.base.Drafter`. One thread calls it.

    ``max_tokens``: finished traffic that is kept, of all namespaces together, rounded up to a power of two;
    49 bytes each, taken from the system as they fill. The oldest goes first. The beginning of a request that
    an earlier one of its namespace had too (a system prompt, a conversation so far) is kept once.

    ``Draft.quality`` tells how likely the first token is to stand: 1 (less than 0.2) to 7 (0.92 and more); 0
    is no draft.
    """

    name = "suffix"
    qualities = len(_LEVELS) + 2

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; the index needs room for at least one token")
        self._traffic = SuffixTraffic(max_tokens, prior())
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()
        self._scopes = itertools.count(_NO_SCOPE + 1)
        self._running: dict[str, _Running] = {}

    @property
    def index_bytes(self) -> int:
        """Memory set aside for finished traffic."""
        return self._traffic.bytes()

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence starts, or starts anew; its tokens are indexed when a draft is first asked for."""
        self._running[sequence.id] = _Running(len(sequence.tokens))

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves. With ``learn`` its tokens, and how well they were guessed, go to its
        namespace."""
        running = self._running.pop(sequence.id)
        if not learn:
            return
        running.catch_up(sequence.tokens)
        namespace = self._namespaces.get(sequence.namespace)
        if namespace is None:
            namespace = _Namespace(next(self._scopes), SuffixRecord(), SuffixRecord())
            self._namespaces[sequence.namespace] = namespace
            if len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
        self._namespaces.move_to_end(sequence.namespace)
        self._traffic.learn(sequence.tokens, namespace.scope)
        namespace.record(sequence.params).add(running.text.record())

    def counts(self, namespace: str, params: SamplingParams) -> list[tuple[float, float]]:
        """(right, seen) of the guesses of ended sequences, greedy or sampled as these parameters are, by
        circumstance as in `suffix_prior`."""
        known = self._namespaces.get(namespace)
        return (SuffixRecord() if known is None else known.record(params)).counts()

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """A draft for each sequence, at most as long as its entry of ``lengths`` says."""
        return [self._propose(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def close(self) -> None:
        """Nothing: its memory goes with it."""

    def _propose(self, sequence: DraftSequence, length: int) -> Draft:
        running = self._running[sequence.id]
        running.catch_up(sequence.tokens)
        namespace = self._namespaces.get(sequence.namespace)
        scope, record = _NO_SCOPE, None
        if namespace is not None:
            scope, record = namespace.scope, namespace.record(sequence.params)
        tokens, survival = running.text.propose(self._traffic, scope, record, max(length, 0), FLOOR)
        if not tokens:
            return NO_DRAFT
        return Draft(tokens, survival, 1 + bisect_right(_LEVELS, survival[0]))
