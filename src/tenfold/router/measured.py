"""Cost curves from the steps that workers make: guessed before there are any, then fitted and kept current.

Steps are put by their size into buckets (powers of two), each of which keeps the latest few and stands in the
fit for one measurement, the median: so what is common does not drown what is rare, an old machine state is
forgotten, and a step that was interrupted counts for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tenfold.protocol import EnginePlan, StepTime
from tenfold.router.timing import WorkerTiming, fit_timing

KEPT = 15
"""Steps of a bucket."""
_BYTES_A_WEIGHT = 0.6
_READ_BYTES_S = 8e9
_FLOPS_A_THREAD = 100e9
"""Of a usual core. A guess may be wrong several times over: deadlines leave room for ten times."""


def guess_timing(plan: EnginePlan) -> WorkerTiming:
    """What a worker's steps may take, by the size of its model."""
    step = plan.weight_bytes / _READ_BYTES_S
    return WorkerTiming(
        chunk_tokens=plan.max_batch_tokens,
        prefill_step=step,
        prefill_token=2 * plan.weight_bytes / _BYTES_A_WEIGHT / (_FLOPS_A_THREAD * plan.threads),
        decode_step=step,
        decode_row=step / 10,
    )


class MeasuredTiming:
    """The curves of workers that are alike, from the times of all their steps."""

    def __init__(self, guess: WorkerTiming) -> None:
        self.timing = guess
        """The newest fit, or the guess."""
        self._prefills: dict[int, deque[tuple[int, float]]] = {}
        self._decodes: dict[tuple[int, int], deque[tuple[int, int, float]]] = {}
        self._new = 0

    def add(self, steps: Iterable[StepTime]) -> None:
        """Steps that were made. One of both kinds counts as its prompts' alone, less what its decodes are
        known to take."""
        for step in steps:
            seconds = step.seconds
            if seconds <= 0 or not (step.prompt_rows or step.decode_rows):
                continue
            self._new += 1
            if step.prompt_rows:
                decodes = self.timing.decode(step.decode_rows, step.context_rows)
                own = max(seconds - decodes, 0.1 * seconds)
                bucket = self._prefills.setdefault(step.prompt_rows.bit_length(), deque(maxlen=KEPT))
                bucket.append((step.prompt_rows, own))
            else:
                # Drafts make a step longer and bring more tokens: what counts is the time of a token each.
                a_token = seconds * step.decode_rows / max(step.tokens, step.decode_rows)
                size = (step.decode_rows.bit_length(), step.context_rows.bit_length())
                self._decodes.setdefault(size, deque(maxlen=KEPT)).append(
                    (step.decode_rows, step.context_rows, a_token)
                )

    def fit(self) -> bool:
        """Fits the curves anew. False, and nothing is changed, if there is nothing new to learn from."""
        if not self._new or not self._prefills or not self._decodes:
            return False
        self._new = 0
        # The median by time for its size: its size goes along, so the point is one that was measured.
        prefills = [
            sorted(kept, key=lambda one: one[1] / one[0])[len(kept) // 2] for kept in self._prefills.values()
        ]
        decodes = [sorted(kept, key=lambda one: one[2])[len(kept) // 2] for kept in self._decodes.values()]
        self.timing = fit_timing(self.timing.chunk_tokens, prefills, decodes)
        return True
