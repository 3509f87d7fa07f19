"""1,000 prompts with speculation and without: no answer may differ.

    python benchmarks/speculation_identity.py
    python benchmarks/speculation_identity.py --model model.gguf --prompts 100 --seed 7

Every prompt is answered once without speculation, then once with each drafter: one that knows the answer, one
that is right about two times in three, one that is always wrong, one that guesses at random, and one that
looks for the last tokens earlier in the text. Groups of 1 to 8 requests arrive at random steps, with drafts
of 0 to 8 tokens, half of them greedy and all with any other parameters, in a KV memory that is too small for
eight; prompts share their first tokens, so parts of them come from the cache. Compared are tokens,
log-probabilities (to the bit) and finish reasons. The exit code is 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from tenfold.backends.base import CompileOptions, Program
from tenfold.backends.native import NativeBackend
from tenfold.bench.prompts import questions
from tenfold.bench.script import run_script
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.engine.engine import Engine
from tenfold.models.registry import build_graph
from tenfold.protocol import FinishReason, Request, SamplingParams, TokenLogprob
from tenfold.server.text import load_text
from tenfold.speculate.base import Draft, DraftSequence
from tenfold.speculate.fixed import FixedSpeculator

KV_PAGES = 36
"""Of 16 tokens: enough for three or four requests."""
EXCERPT = 300
"""Characters of the manual in a prompt."""
Guess = Callable[[DraftSequence, int], Sequence[int]]


class Answer(msgspec.Struct):
    """What is compared."""

    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None


Answers = dict[str, Answer]


class FunctionDrafter:
    """Drafts what a function says, at most ``k`` tokens."""

    qualities = 1

    def __init__(self, name: str, guess: Guess) -> None:
        self.name = name
        self.k = 0
        self._guess = guess

    def begin(self, sequence: DraftSequence) -> None:
        """Nothing."""

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """Nothing."""

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """Without an estimate."""
        drafts = [
            self._guess(one, min(length, self.k)) for one, length in zip(sequences, lengths, strict=True)
        ]
        return [Draft(tokens, [1.0] * len(tokens)) for tokens in drafts]

    def close(self) -> None:
        """Nothing."""


def drafters(law: Answers, vocab: int, dice: random.Random) -> list[FunctionDrafter]:
    """Those of the head of this file."""

    def right(one: DraftSequence, k: int) -> list[int]:
        at = len(one.tokens) - one.prompt_length
        return law[one.id].tokens[at : at + k]

    def mixed(one: DraftSequence, k: int) -> list[int]:
        return [token if dice.random() < 0.67 else dice.randrange(vocab) for token in right(one, k)]

    def lookup(one: DraftSequence, k: int) -> list[int]:
        tokens = one.tokens
        for at in range(len(tokens) - 3, 0, -1):
            if tokens[at - 1 : at + 1] == tokens[-2:]:
                return tokens[at + 1 : at + 1 + k]
        return []

    return [
        FunctionDrafter("knows the answer", right),
        FunctionDrafter("right two times in three", mixed),
        FunctionDrafter("always wrong", lambda one, k: [(token + 1) % vocab for token in right(one, k)]),
        FunctionDrafter("random", lambda one, k: [dice.randrange(vocab) for _ in range(k)]),
        FunctionDrafter("looks up", lookup),
    ]


def any_params(dice: random.Random, tokens: int, vocab: int) -> SamplingParams:
    """Greedy, or any of what can be asked for."""
    maybe: dict[str, Callable[[], Any]] = {
        "top_k": lambda: dice.choice([1, 5, 40]),
        "top_p": lambda: dice.choice([0.5, 0.9]),
        "min_p": lambda: 0.05,
        "repetition_penalty": lambda: dice.choice([0.9, 1.2]),
        "presence_penalty": lambda: 0.8,
        "frequency_penalty": lambda: 0.5,
        "logit_bias": lambda: {dice.randrange(vocab): dice.choice([-float("inf"), 4.0]) for _ in range(50)},
        "logprobs": lambda: dice.randint(0, 5),
        "stop_token_ids": lambda: tuple(dice.randrange(vocab) for _ in range(200)),
        "max_tokens": lambda: dice.randint(1, tokens),
        "ignore_eos": lambda: True,
    }
    chosen = {name: value() for name, value in maybe.items() if dice.random() < 0.3}
    temperature = 0.0 if dice.random() < 0.5 else dice.choice([0.5, 0.8, 1.0, 1.5])
    given = {"max_tokens": tokens, "temperature": temperature, "seed": dice.randrange(2**64), **chosen}
    return SamplingParams(**given)


def play(engine: Engine, requests: Sequence[Request], dice: random.Random) -> Answers:
    """Answers to requests that arrive at random steps."""
    arrivals = sorted((dice.randint(0, 12), one.id, one) for one in requests)
    answers: Answers = {one.id: Answer() for one in requests}
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            engine.add(arrivals.pop(0)[2])
        for chunk in engine.step():
            answer = answers[chunk.id]
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs or ()
            answer.finish = chunk.finish
        step += 1
    engine.check_integrity()
    return answers


def groups(requests: Sequence[Request]) -> Iterator[tuple[Sequence[Request], int]]:
    """The requests in groups of 1 to 8 with a K of 0 to 8, all pairs in turn."""
    at = number = 0
    while at < len(requests):
        size = 1 + number % 8
        yield requests[at : at + size], number % 9
        at += size
        number += 1


class Pass(msgspec.Struct):
    """All prompts with one drafter."""

    drafter: str
    differ: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0

    def text(self) -> str:
        """For people."""
        return (
            f"{self.drafter:24} {self.differ:6} differ {self.drafted:9} drafted {self.accepted:9} stood"
            f"{self.preemptions:6} put back {self.cached_tokens:9} prompt tokens cached"
        )


def compare(
    program: Program, drafter: FunctionDrafter, requests: list[Request], law: Answers, dice: random.Random
) -> Pass:
    """Counts the answers that differ from ``law``."""
    engine = Engine(program, speculator=FixedSpeculator(drafter, 8))
    differ = 0
    for group, k in progress(groups(requests), drafter.name):
        drafter.k = k
        answers = play(engine, group, dice)
        differ += sum(answers[one.id] != law[one.id] for one in group)
    load = engine.load()
    assert load.speculation is not None
    if load.speculation.faults:
        raise ValueError(f"the drafter that {drafter.name} failed")
    return Pass(
        drafter=drafter.name,
        differ=differ,
        drafted=load.speculation.drafted_tokens,
        accepted=load.speculation.accepted_tokens,
        preemptions=load.preemptions,
        cached_tokens=load.cached_tokens,
    )


def progress(
    groups: Iterator[tuple[Sequence[Request], int]], name: str
) -> Iterator[tuple[Sequence[Request], int]]:
    """The groups, with a bar for people who wait."""
    yield from tqdm(list(groups), desc=name, disable=not sys.stderr.isatty())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    path = locate(args.model)
    text = load_text(str(path))
    checkpoint = open_checkpoint(path)
    try:
        program = NativeBackend().compile(
            build_graph(checkpoint.config),
            checkpoint,
            CompileOptions(threads=args.threads, max_rows=256, max_logit_rows=72, kv_pages=KV_PAGES),
        )
    finally:
        checkpoint.close()
    vocab = program.info.vocab_size
    requests = [
        Request(
            id=str(number),
            prompt=tuple(text.encode_chat(messages)),
            params=any_params(dice, args.tokens, vocab),
            eos_token_ids=tuple(text.tokenizer.eos_token_ids),
        )
        for number, messages in enumerate(questions(args.prompts, EXCERPT))
    ]
    engine = Engine(program)
    law: Answers = {}
    for group, _ in progress(groups(requests), "without speculation"):
        law |= play(engine, group, dice)
    passes = [compare(program, drafter, requests, law, dice) for drafter in drafters(law, vocab, dice)]
    program.close()
    differ = sum(one.differ for one in passes)
    if args.json:
        print(json.dumps(msgspec.to_builtins(passes)))
    else:
        print("\n".join(one.text() for one in passes))
        print(
            f"{len(requests)} prompts, {len(passes)} drafters, K of 0 to 8, 1 to 8 requests at once: "
            f"{differ} of {len(requests) * len(passes)} answers differ; "
            f"{sum(one.drafted for one in passes)} tokens drafted, "
            f"{sum(one.accepted for one in passes)} stood"
        )
    return int(differ > 0)


if __name__ == "__main__":
    run_script(main)
