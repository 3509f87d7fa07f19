"""The tokens that a head can draft.

A few thousand tokens make up nearly all of what a deployment's answers say, and a head that has output rows
for them alone reads that much less (frequency-ranked draft vocabularies: FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def choose_tokens(
    answers: Iterable[Sequence[int]], size: int, always: Iterable[int] = (), rest: Iterable[int] = ()
) -> tuple[int, ...]:
    """The ``always`` tokens and the most used of ``answers``, then those of ``rest`` for which there is room
    left: at most ``size`` in all, in ascending order.

    Of equally frequent tokens, and of ``rest``, the lower id is taken: vocabularies are made of the frequent
    first. Fewer come back where all these are fewer. Raises ValueError if ``always`` alone are more.
    """
    chosen = set(always)
    if len(chosen) > size:
        raise ValueError(f"{len(chosen)} tokens are always drafted, but there is room for {size}")
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    wanted = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    for token in [*wanted, *sorted(rest)]:
        if len(chosen) == size:
            break
        chosen.add(token)
    return tuple(sorted(chosen))


def coverage(answers: Iterable[Sequence[int]], tokens: Sequence[int]) -> float:
    """The share of the answers' tokens that are among ``tokens``; 0 where there are none."""
    known = set(tokens)
    total = inside = 0
    for answer in answers:
        total += len(answer)
        inside += sum(token in known for token in answer)
    return inside / total if total else 0.0
