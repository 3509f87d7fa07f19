"""The cost of sending a request to each worker, in seconds.

It is what the request adds to the waiting of everyone, itself included:

- *wait*: until the prompts sent there before are computed, and, where all requests there need more pages than
  the worker has, until enough of them have ended: a whole answer's time for each time they fill it;
- *prefill*: for the part of the prompt that is not there, in chunks, each beside a decoding step;
- *shared*: the prompt that waits there last ends later if this one fills up its step;
- *streams*: every stream there waits for these chunks too, each of its own tokens takes a step among the
  others, and the others' tokens come later beside one more. A second of a stream is spread over all its
  tokens, and counts a twentieth of a second in which nothing is to be seen yet (`STREAM_WEIGHT`);
- *displaced*: the pages that it needs drive others out, which will be computed again if they are wanted. How
  often they are is taken to be how often a prompt's tokens are found at all (``reuse``); who finds a page
  gone waits for it, and so do those behind it, hence twice (`DISPLACED_WEIGHT`).

Because all is in seconds, the known evils of cache-aware routing are priced: a short prefix that everyone
shares is worth only the milliseconds it saves, less than a queue; a long conversation stays where it is until
the queue there is longer than its prefill; and a copy of it elsewhere is charged for what it displaces. The
two weights were chosen by simulation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenfold.router.base import Cost
from tenfold.router.books import Books
from tenfold.router.timing import Floats, WorkerTiming

Ints = npt.NDArray[np.int64]


STREAM_WEIGHT = 0.05
DISPLACED_WEIGHT = 2.0


class Costs:
    """The terms of the cost, [slots] each."""

    __slots__ = ("displaced", "prefill", "shared", "streams", "total", "wait")

    def __init__(
        self, wait: Floats, prefill: Floats, shared: Floats, streams: Floats, displaced: Floats
    ) -> None:
        self.wait = wait
        self.prefill = prefill
        self.shared = shared
        self.streams = streams
        self.displaced = displaced
        self.total = wait + prefill + shared + streams + displaced

    def at(self, slot: int) -> Cost:
        """Of one worker."""
        return Cost(
            float(self.wait[slot]),
            float(self.prefill[slot]),
            float(self.shared[slot]),
            float(self.streams[slot]),
            float(self.displaced[slot]),
        )


def costs(
    books: Books,
    timing: WorkerTiming,
    prompt_tokens: int,
    overlap_tokens: Ints,
    output: float,
    page_tokens: int,
    reuse: float,
    now: float,
) -> Costs:
    """The cost for each slot, with the cost curves ``timing`` (workers that differ from it do so by their
    ``slow``)."""
    rows, context, slow = books.decodes + books.prefills, books.context, books.slow
    missing = np.maximum(prompt_tokens - overlap_tokens, 1).astype(np.float64)
    seconds, steps = timing.chunks(missing)
    curve = timing.decode_context + timing.decode_context2 * context
    beside = np.where(rows > 0, timing.decode_step + timing.decode_row * rows + curve * context, 0.0)
    prefill = (seconds + steps * beside) * slow
    room = np.maximum(books.capacity, 1.0) * page_tokens
    beyond = np.maximum(context + prompt_tokens + output - room, 0.0) / room
    wait = books.wait(now) + 0.5 * beside * (books.prefills == 0) + beyond * output * beside * slow
    # Each step is longer by the new sequence's row and context: for it and for all others.
    own = timing.decode_row + timing.decode_context * prompt_tokens
    alone = timing.decode_row * rows + curve * context
    streams = rows * prefill + output * (alone + rows * own) * slow
    left = timing.chunk_tokens - books.last_tokens % timing.chunk_tokens
    joins = (books.prefills > 0) & (books.last_begins >= now)
    shared = np.where(joins, np.minimum(left, missing) * (timing.token_seconds * slow), 0.0)
    pages = (missing + output) / page_tokens
    driven_out = np.maximum(pages - np.maximum(books.capacity - books.held, 0.0), 0.0)
    displaced = driven_out * (DISPLACED_WEIGHT * page_tokens * timing.token_seconds * reuse)
    return Costs(wait, prefill, shared, STREAM_WEIGHT * streams, displaced)
