"""What the suffix drafter is worth on recorded traffic: acceptance by position, tokens per step, projected
speed.

    python benchmarks/suffix_traffic.py --data TAU_BENCH_FOLDER --write traffic.jsonl
    python benchmarks/suffix_replay.py traffic.jsonl

Each class is a namespace. Its conversations come in order; a conversation's requests are learnt when it has
ended. The first half warms the index up, the figures are of the second half. A draft of 8 tokens is asked for
at every token of an answer from its second on; a step commits what agrees and one token more. `controlled`:
the length of each draft is chosen by the drafter's own survival for the most tokens per cost, where a step of
1 + k rows costs V(1 + k) (`--curve`), at the exchange rate that was best on the first half. Answers that
repeat themselves (less than 0.6 of their 4-grams are distinct) are left out of the figures.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from tenfold.backends.base import Floats
from tenfold.bench.figures import table
from tenfold.bench.script import run_script
from tenfold.protocol import SamplingParams
from tenfold.speculate.base import Drafter
from tenfold.speculate.suffix import SuffixDrafter

POSITIONS, LONGEST = 6, 8


class Line(TypedDict):
    """An answer as `suffix_traffic.py` wrote it."""

    conversation: int
    temperature: float
    prompt: list[int]
    output: list[int]


@dataclass
class Replayed:
    """A `DraftSequence` whose tokens are known beforehand."""

    id: str
    tokens: list[int]
    prompt_length: int
    namespace: str
    params: SamplingParams
    seed: int = 0
    features: Floats | None = None


@dataclass
class Answer:
    """One answer: at each token from the second on, the draft's agreement and its survival as estimated."""

    conversation: int
    repetitive: bool
    agreed: list[int]
    survival: list[Sequence[float]]
    quality: list[int]


def replay(lines: list[Line], drafter: Drafter, namespace: str) -> list[Answer]:
    """Drafts at every token of every answer, in order; a conversation is learnt from once it has ended."""
    answers: list[Answer] = []
    ended: list[Replayed] = []
    for number, line in enumerate(lines):
        if answers and answers[-1].conversation != line["conversation"]:
            for each in ended:
                drafter.end(each, learn=True)
            ended.clear()
        prompt, output = line["prompt"], line["output"]
        sequence = Replayed(str(number), prompt + output[:1], len(prompt), namespace, params_of(line))
        drafter.begin(sequence)
        answer = Answer(line["conversation"], repeats(output), [], [], [])
        for at in range(1, len(output)):
            (draft,) = drafter.propose([sequence], [LONGEST])
            agreed = 0
            for guess, truth in zip(draft.tokens, output[at:], strict=False):
                if guess != truth:
                    break
                agreed += 1
            answer.agreed.append(agreed)
            answer.survival.append(draft.survival)
            answer.quality.append(draft.quality)
            sequence.tokens.append(output[at])
        answers.append(answer)
        ended.append(sequence)
    return answers


def params_of(line: Line) -> SamplingParams:
    """How an answer was drawn."""
    return SamplingParams(temperature=line["temperature"])


def first_half(lines: list[Line]) -> list[Line]:
    """The answers of the first half of the conversations, which settings may be chosen on."""
    conversations = sorted({line["conversation"] for line in lines})
    return [line for line in lines if line["conversation"] < conversations[len(conversations) // 2]]


def repeats(output: Sequence[int]) -> bool:
    """Whether an answer is of the sort that flatters drafters."""
    grams = [tuple(output[i : i + 4]) for i in range(len(output) - 3)]
    return bool(grams) and len(set(grams)) < 0.6 * len(grams)


def walk(
    answers: Sequence[Answer], length: Callable[[Sequence[float]], int], curve: Sequence[float]
) -> tuple[float, float]:
    """(tokens, cost in steps of one row) when each step verifies as many tokens as ``length`` says."""
    tokens = cost = 0.0
    for answer in answers:
        at = 0
        while at < len(answer.agreed):
            drafted = min(length(answer.survival[at]), len(answer.survival[at]))
            committed = min(min(answer.agreed[at], drafted) + 1, len(answer.agreed) - at)
            tokens, cost, at = tokens + committed, cost + curve[drafted], at + committed
    return tokens, cost


def controlled(rate: float, curve: Sequence[float]) -> Callable[[Sequence[float]], int]:
    """The length that brings the most tokens beyond their cost at so many tokens for a step of one row."""

    def length(survival: Sequence[float]) -> int:
        best = value = total = 0.0
        chosen = 0
        for k, each in enumerate(survival, 1):
            total += each
            value = total - rate * (curve[k] - curve[0])
            if value > best:
                best, chosen = value, k
        return chosen

    return length


def figures(name: str, answers: Sequence[Answer], curve: Sequence[float]) -> list[str]:
    """The line of one class in the table."""
    conversations = sorted({each.conversation for each in answers})
    middle = conversations[len(conversations) // 2]
    early = [each for each in answers if each.conversation < middle and not each.repetitive]
    late = [each for each in answers if each.conversation >= middle and not each.repetitive]
    rate = 1.0
    for _ in range(8):
        tokens, cost = walk(early, controlled(rate, curve), curve)
        rate = tokens / cost
    agreed = [each for answer in late for each in answer.agreed]
    flat = [1.0] * (LONGEST + 1)
    fixed = [walk(late, lambda _, k=k: k, flat) for k in range(1, POSITIONS + 1)]  # type: ignore[misc]
    tokens, steps = walk(late, controlled(rate, curve), flat)
    _, cost = walk(late, controlled(rate, curve), curve)
    return [
        name,
        str(len(agreed)),
        " ".join(f"{sum(each > k for each in agreed) / len(agreed):.3f}" for k in range(POSITIONS)),
        " ".join(f"{tokens / cost:.2f}" for tokens, cost in fixed),
        f"{tokens / steps:.2f}",
        f"{tokens / cost:.2f}",
    ]


def calibration(answers: Sequence[Answer]) -> list[list[str]]:
    """For each quality: how many drafts, the first token's estimate and how often it stood."""
    found: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for answer in answers:
        for agreed, survival, quality in zip(answer.agreed, answer.survival, answer.quality, strict=True):
            found[quality].append((survival[0] if survival else 0.0, agreed > 0))
    return [
        [
            str(quality),
            str(len(some)),
            f"{sum(p for p, _ in some) / len(some):.3f}",
            f"{sum(right for _, right in some) / len(some):.3f}",
        ]
        for quality, some in sorted(found.items())
    ]


def read(path: Path) -> dict[str, list[Line]]:
    """The answers of each class, in order."""
    classes: dict[str, list[Line]] = defaultdict(list)
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        classes[answer["class"]].append(answer)
    return classes


def main() -> int:
    """Replays and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traffic", type=Path, help="what suffix_traffic.py wrote")
    parser.add_argument("--curve", default="1,1.1,1.2,1.3,1.45,1.6,1.75,1.9,2", help="V of 1 to 9 rows")
    args = parser.parse_args()
    curve = [float(each) for each in args.curve.split(",")]
    if len(curve) != LONGEST + 1:
        parser.error(f"--curve has {len(curve)} entries; it must have {LONGEST + 1}")
    rows, answers = [], []
    for name, lines in read(args.traffic).items():
        some = replay(lines, SuffixDrafter(), name)
        rows.append(figures(name, some, curve))
        answers += [each for each in some if not each.repetitive]
    head = ["class", "anchors", "positions 1 to 6 stand", "tokens/step, K = 1 to 6", "controlled", "speed"]
    print(table(head, rows))
    print(table(["quality", "drafts", "estimate", "stood"], calibration(answers)))
    return 0


if __name__ == "__main__":
    run_script(main)
