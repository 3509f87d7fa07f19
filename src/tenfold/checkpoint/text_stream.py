"""From tokens to text that may be sent, as they come.

A stream's text is that of `Tokenizer.decode`: the bytes of its tokens, one after the other, read as UTF-8. It
knows nothing of the prompt: an answer that begins inside a character begins with U+FFFD, with no byte of the
prompt. Three laws hold for every way to cut the tokens into pushes: the same text is sent; only whole
characters are sent; and nothing is sent that is, or may yet turn out to be, part of a stop string.

Of several stop strings the first to be complete ends the text, of those complete at the same character the
longest.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable

from tenfold.checkpoint.tokenizer import Tokenizer


class StopStrings:
    """The stop strings of a request as an automaton over characters (Aho and Corasick 1975). Immutable.

    A state is the longest end of the text so far that begins a stop string. Raises ValueError for an empty
    string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fallback: list[int] = [0]
        """The state for the next shorter such end."""
        self.depth: list[int] = [0]
        """How many characters of the text a state stands for."""
        self.match: list[str | None] = [None]
        """The longest stop string that is complete in a state."""
        for string in strings:
            if not string:
                raise ValueError("stop: a stop string is empty")
            state = 0
            for char in string:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.fallback.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                state = self.next[state][char]
            self.match[state] = string
        # Breadth first: a state's fallback is shallower than the state, so it is ready when it is needed.
        todo = deque(self.next[0].values())
        while todo:
            state = todo.popleft()
            for char, child in self.next[state].items():
                at = self.fallback[state]
                while at and char not in self.next[at]:
                    at = self.fallback[at]
                self.fallback[child] = self.next[at].get(char, 0)
                todo.append(child)
            if self.match[state] is None:
                self.match[state] = self.match[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        """The state behind ``char``. Begin with 0."""
        while state and char not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(char, 0)


class TextStream:
    """The text of one answer. Costs O(1) per character, amortised, however many stop strings there are.

    ``skip_special_tokens``: special tokens are no text: they are neither sent nor part of a stop string; but
    for those in ``shown``, which are sent by name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop) if stop else None
        self._state = 0
        self._held = ""
        """Characters that are not sent: the longest end of the text so far that begins a stop string."""
        self._finished = False
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.tokens_used = 0
        """Tokens of the answer, up to and including the one that completed the stop string."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that may be sent now. Tokens behind a stop string are ignored. Raises ValueError after
        `finish`."""
        if self._finished:
            raise ValueError("a text stream that is finished takes no more tokens")
        sent = []
        for token in token_ids:
            if self.stopped is not None:
                break
            self.tokens_used += 1
            data = self._tokenizer.token_bytes(token, self._skip_special_tokens and token not in self._shown)
            text = self._decoder.decode(data)
            if text:
                sent.append(text if self._stops is None else self._release(self._stops, text))
        return "".join(sent)

    def finish(self) -> str:
        """What was held back, once no token follows; empty after a stop string. An unfinished character is
        U+FFFD."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        text = self._decoder.decode(b"", final=True)
        sent = text if self._stops is None else self._release(self._stops, text)
        if self.stopped is None:
            sent += self._held
            self._held = ""
        return sent

    def _release(self, stops: StopStrings, text: str) -> str:
        """Takes new text in; gives back what can no longer be part of a stop string."""
        state = self._state
        for at, char in enumerate(text):
            state = stops.step(state, char)
            found = stops.match[state]
            if found is not None:
                self.stopped = found
                sent = (self._held + text[: at + 1])[: -len(found)]
                self._held = ""
                return sent
        self._state = state
        whole = self._held + text
        safe = len(whole) - stops.depth[state]
        self._held = whole[safe:]
        return whole[:safe]
