"""What a lookup of the suffix drafter costs: CPU microseconds for a draft of up to 8 tokens, by indexed
tokens.

    python benchmarks/suffix_lookup.py

Traffic is text of Python's manual, cut into requests, with a share of its words exchanged so that nothing but
its phrases repeats. A lookup is one `propose` for one sequence, after a step that committed one or several
tokens: it indexes them, settles the last draft and makes the next. `repetitive` is the same for a text of one
token 100,000 times, beside traffic of the same.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np

from tenfold.backends.base import Floats
from tenfold.bench.figures import table
from tenfold.bench.script import run_script
from tenfold.checkpoint.locate import locate
from tenfold.protocol import SamplingParams
from tenfold.server.text import load_text
from tenfold.speculate.suffix import SuffixDrafter

REQUEST, PROMPT, STEPS, LENGTH = 1024, 512, 256, 8


@dataclass
class Growing:
    """A `DraftSequence` that a benchmark lets grow."""

    id: str
    tokens: list[int]
    prompt_length: int
    namespace: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    features: Floats | None = None


def requests(text: list[int], count: int, rng: random.Random) -> list[list[int]]:
    """Stretches of a text in which one token of twenty is another one."""
    found = []
    for _ in range(count):
        first = rng.randrange(len(text) - REQUEST)
        stretch = text[first : first + REQUEST]
        found.append([rng.randrange(40_000) if rng.random() < 0.05 else token for token in stretch])
    return found


def learn(drafter: SuffixDrafter, many: Sequence[list[int]]) -> float:
    """CPU microseconds for a token."""
    sequences = [Growing(str(i), tokens, PROMPT) for i, tokens in enumerate(many)]
    start = time.process_time()
    for each in sequences:
        drafter.begin(each)
        drafter.end(each, learn=True)
    return (time.process_time() - start) / sum(len(each) for each in many) * 1e6


def lookups(drafter: SuffixDrafter, tokens: list[int], steps: int) -> tuple[float, list[float], list[int]]:
    """(microseconds for each token of the prompt, then microseconds and drafted tokens of each lookup)."""
    prompt = len(tokens) - steps
    sequence = Growing("running", tokens[:prompt], prompt)
    drafter.begin(sequence)
    start = time.process_time()
    drafter.propose([sequence], [LENGTH])
    first = (time.process_time() - start) / prompt * 1e6
    micros, drafted = [], []
    while len(sequence.tokens) < len(tokens):
        sequence.tokens += tokens[len(sequence.tokens) :][: 1 + len(sequence.tokens) % 3]
        start = time.process_time()
        (draft,) = drafter.propose([sequence], [LENGTH])
        micros.append((time.process_time() - start) * 1e6)
        drafted.append(len(draft.tokens))
    drafter.end(sequence, learn=False)
    return first, micros, drafted


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="whose tokenizer: a file, a folder, or a known name"
    )
    parser.add_argument("--rounds", type=int, default=20, help="running requests for each size")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    rng = random.Random(7)
    text = load_text(str(locate(args.model))).encode_prompt(
        "\n\n".join(topics[key] for key in sorted(topics))
    )
    cases = []
    for size in (10_000, 100_000, 1_000_000):
        drafter = SuffixDrafter(size)
        learnt = learn(drafter, requests(text, 2 * size // REQUEST + 1, rng))
        cases.append((f"{size:,}", drafter, learnt, requests(text, args.rounds, rng), STEPS))
    drafter = SuffixDrafter(1_000_000)
    learnt = learn(drafter, [[5] * 100_000 + [token] for token in range(20)])
    cases.append(("repetitive", drafter, learnt, [[5] * 100_000], STEPS))
    found = []
    for name, drafter, learnt, some, steps in cases:
        firsts, micros, drafted = [], [], []
        for tokens in some:
            first, times, lengths = lookups(drafter, tokens, steps)
            firsts.append(first)
            micros += times
            drafted += lengths
        found.append(
            {
                "indexed": name,
                "lookup_us": float(np.mean(micros)),
                "p50_us": float(np.median(micros)),
                "p99_us": float(np.percentile(micros, 99)),
                "drafted": float(np.mean(drafted)),
                "prompt_us_per_token": float(np.median(firsts)),
                "learn_us_per_token": learnt,
                "mib": drafter.index_bytes / 2**20,
            }
        )
    if args.as_json:
        print(json.dumps(found, indent=2))
    else:
        print(
            table(
                list(found[0]), [[v if isinstance(v, str) else f"{v:.2f}" for v in f.values()] for f in found]
            )
        )
    return 0


if __name__ == "__main__":
    run_script(main)
