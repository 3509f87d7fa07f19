"""From an engine's chunks to text: what of a request's tokens is shown, counted, and when it is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tenfold.protocol import Chunk, FinishReason, TokenLogprob
from tenfold.server.text import Stream


@dataclass
class Piece:
    """What became visible: text, and the tokens behind it, with log-probabilities if they were asked for.

    Text may lag behind tokens: half a character, or what may become a stop string, is held back.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Output:
    """The visible side of one request. Nothing after a stop string is shown or counted."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.completion_tokens = 0
        """Tokens generated, the one that ended the request included."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache when the request first ran; None before that."""
        self.queue_ms: float | None = None
        self.steps = 0
        """Of the engine, with tokens of this request; the prefill's own does not count."""
        self.step_tokens = 0
        """Tokens that came of them."""
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.error_field: str | None = None

    def push(self, chunks: Iterable[Chunk]) -> Piece:
        """Takes news in order; sets ``finish`` at the end, when the engine may still be at work."""
        piece = Piece()
        stream = self._stream
        for chunk in chunks:
            if self.finish is not None:
                break
            if self.cached_tokens is None:  # a resumed request reports them anew; the first run counts
                self.cached_tokens, self.queue_ms = chunk.cached_tokens, chunk.queue_ms
            elif chunk.tokens and chunk.cached_tokens is None:
                self.steps += 1
                self.step_tokens += len(chunk.tokens)
            # A token that ended the request counts but is not shown.
            ended = chunk.stop_token is not None and chunk.tokens[-1:] == (chunk.stop_token,)
            shown = chunk.tokens[:-1] if ended else chunk.tokens
            before = self.completion_tokens
            if shown:
                piece.text += stream.push(shown)
            if stream.stopped is not None:
                self.finish = "stop"
                self.completion_tokens = stream.tokens_used
                shown = shown[: self.completion_tokens - before]
            else:
                self.completion_tokens += len(chunk.tokens)
                self.finish, self.error = chunk.finish, chunk.error
                self.error_field = chunk.error_field
                if chunk.finish is not None:
                    piece.text += stream.finish()
            piece.tokens += shown
            if chunk.logprobs is not None:
                piece.logprobs += chunk.logprobs[: len(shown)]
        return piece
