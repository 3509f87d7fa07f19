"""One choice of a request, from the engine's chunks to deltas of events."""

from __future__ import annotations

from collections.abc import Iterable

from tenfold.protocol import Chunk, FinishReason
from tenfold.server.answer_events import Delta, Finish
from tenfold.server.answer_stream import AnswerStream
from tenfold.server.output import Output


class Answer:
    """One choice of a request: its chunks as deltas, its counts, its end."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._output = Output(stream)
        self.finish: Finish | None = None
        """Set once the answer is over, when the engine may still be at work."""

    def push(self, chunks: Iterable[Chunk]) -> Delta:
        """Takes news in order. The last delta ends with `Finish`, unless the engine failed: see ``error``."""
        output, stream = self._output, self._stream
        piece = output.push(chunks)
        delta = Delta(stream.take(), piece.tokens, piece.logprobs)
        if output.finish in ("stop", "length") and self.finish is None:
            if output.finish == "length":
                self.finish = Finish("length")
            else:
                self.finish = Finish("tool_calls" if stream.calls else "stop", stream.stopped or None)
            delta.events.append(self.finish)
        return delta

    @property
    def engine_finish(self) -> FinishReason | None:
        """How the engine, or a stop string, ended it; ``error`` and ``abort`` are no answer."""
        return self._output.finish

    @property
    def error(self) -> str | None:
        """What the engine says of its failure."""
        return self._output.error

    @property
    def error_field(self) -> str | None:
        """The request's field at fault, if the failure is its own."""
        return self._output.error_field

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, the one that ended the answer included, and none behind a stop string."""
        return self._output.completion_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Of those, what went into reasoning."""
        return self._stream.reasoning_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache; None before it ran."""
        return self._output.cached_tokens

    @property
    def steps(self) -> int:
        """Of the engine, with tokens of this answer; the prefill's own does not count."""
        return self._output.steps

    @property
    def step_tokens(self) -> int:
        """Tokens that came of them."""
        return self._output.step_tokens

    @property
    def queue_ms(self) -> float | None:
        """How long it waited in the engine."""
        return self._output.queue_ms
