"""SentencePiece's BPE: characters are merged pairwise, the pair whose union has the highest score first.

Algorithm: SentencePiece (Kudo and Richardson 2018), bpe_model; of equal scores the leftmost goes first. A
library for merge *lists* cannot say that two pairs rank equally, so it may differ where pieces repeat; and to
derive a list for 262 thousand tokens takes over a second. Here a vocabulary is a dictionary.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping

from tenfold.checkpoint.tokenizer_base import SPACE

_CACHED_WORDS = 1 << 16
_CACHED_WORD_CHARS = 32
_NONE = -1


class TokenSplitter:
    """Cuts a text at the tokens that are matched before any merging: the leftmost, and there the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._starts: dict[str, tuple[int, set[str], list[int]]] = {}
        by_first: dict[str, list[str]] = {}
        for text in ids:
            by_first.setdefault(text[0], []).append(text)
        for first, texts in by_first.items():
            lengths = sorted({len(text) for text in texts}, reverse=True)
            # Most places with a right first character are dismissed by one look-up of the shortest length.
            self._starts[first] = (lengths[-1], {text[: lengths[-1]] for text in texts}, lengths)
        self._first = re.compile("[" + "".join(map(re.escape, self._starts)) + "]") if self._starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of ``text`` in order: token ids, and the text between them (never empty)."""
        done = 0
        while (found := self.find(text, done)) is not None:
            start, end = found
            if start > done:
                yield text[done:start]
            yield self._ids[text[start:end]]
            done = end
        if done < len(text):
            yield text[done:]

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """Where the next token from ``start`` on begins and ends."""
        while self._first is not None and (match := self._first.search(text, start)):
            at = match.start()
            shortest, prefixes, lengths = self._starts[text[at]]
            if text[at : at + shortest] in prefixes:
                for length in lengths:
                    if text[at : at + length] in self._ids:
                        # A slice at the text's end may be shorter than asked for: its own length counts.
                        return at, min(at + length, len(text))
            start = at + 1
        return None


class SentencePieceEncoder:
    """An encoder for a vocabulary with scores.

    ``scores`` holds the tokens that merging may produce, ``ids`` the id of each. ``byte_ids`` has 256 ids for
    the bytes of characters that are in no token, or is None: then such a character is ``unknown_id``.
    ``special`` and ``user_defined`` tokens are never a result of merging. With ``space_prefix`` a text (and
    what follows a special token) begins with a space.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Mapping[str, float],
        *,
        special: Mapping[str, int],
        user_defined: Mapping[str, int],
        byte_ids: list[int] | None,
        unknown_id: int | None,
        space_prefix: bool,
    ) -> None:
        self._ids = ids
        self._ranks = scores
        self._with_special = TokenSplitter({**special, **user_defined})
        self._without_special = TokenSplitter(user_defined)
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._space_prefix = space_prefix
        # No merge crosses a place whose two characters stand side by side in no token, so a text may be cut
        # before a space, but for characters that a space follows in some token (Gemma 3: only ">").
        crossing = set(re.findall(f"([^{SPACE} ]){SPACE}", " ".join(scores)))
        self._words = re.compile(f"(?<![{SPACE}{''.join(map(re.escape, sorted(crossing)))}])(?={SPACE})")
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        cache = self._cache
        after_special = True
        for part in (self._with_special if parse_special else self._without_special).split(text):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
                continue
            if self._space_prefix and after_special:
                part = " " + part
            after_special = False
            for word in self._words.split(part.replace(" ", SPACE)):
                known = cache.get(word)
                if known is None:
                    known = self._encode_word(word)
                    if len(word) <= _CACHED_WORD_CHARS:
                        if len(cache) >= _CACHED_WORDS:
                            cache.clear()
                        cache[word] = known
                ids += known
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for symbol in self._merge(word):
            token = self._ids.get(symbol)
            if token is not None:
                ids.append(token)
            elif self._byte_ids is not None:
                ids += [self._byte_ids[byte] for byte in symbol.encode("utf-8")]
            elif self._unknown_id is not None:
                ids.append(self._unknown_id)
        return ids

    def _merge(self, word: str) -> list[str]:
        """Merges until no two neighbours form a token. O(n log n) for n characters."""
        scores = self._ranks
        symbols = list(word)
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), _NONE]
        # Entries (-score, left, right, length of both): the heap's order is the merging order. An entry is
        # stale, and is skipped, when one of its symbols has since been merged away or has grown.
        queue: list[tuple[float, int, int, int]] = []
        for left in range(len(symbols) - 1):
            score = scores.get(symbols[left] + symbols[left + 1])
            if score is not None:
                queue.append((-score, left, left + 1, 2))
        heapq.heapify(queue)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            merged = symbols[left] + symbols[right]
            symbols[left], symbols[right] = merged, ""
            following = after[left] = after[right]
            if following != _NONE:
                before[following] = left
                score = scores.get(merged + symbols[following])
                if score is not None:
                    size = len(merged) + len(symbols[following])
                    heapq.heappush(queue, (-score, left, following, size))
            preceding = before[left]
            if preceding != _NONE:
                score = scores.get(symbols[preceding] + merged)
                if score is not None:
                    size = len(symbols[preceding]) + len(merged)
                    heapq.heappush(queue, (-score, preceding, left, size))
        return [symbol for symbol in symbols if symbol]
