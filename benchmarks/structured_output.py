"""What a JSON Schema costs: tokens a second with one and without, in pairs, at 1 and 8 streams.

    python benchmarks/structured_output.py
    python benchmarks/structured_output.py --model model.gguf --pairs 9 --tokens 256

Both answers of a pair have the same number of tokens: the schema is one whose text goes on beyond that.
Without speculation a pair shows what masks cost; with it, what is gained where the text is forced. Figures
are medians over pairs, with the quartiles of the ratio. One thread, by its CPU time, so that neighbours on
the machine count little.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median, quantiles
from typing import Any

from tenfold import LLM
from tenfold.bench.script import run_script
from tenfold.protocol import Constraint, SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 16},
        "last_name": {"type": "string", "maxLength": 16},
        "email_address": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.com$"},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "employment_status": {"enum": ["employed", "unemployed", "retired", "student"]},
    },
    "required": ["first_name", "last_name", "email_address", "age_in_years", "employment_status"],
    "additionalProperties": False,
}
PEOPLE = json.dumps({"type": "array", "items": PERSON, "minItems": 100})
PROMPT = "Write a list of people as JSON, each with first and last name, e-mail, age and status."


def rate(llm: LLM, streams: int, params: SamplingParams) -> float:
    """Tokens a second of CPU time, of so many answers at once, prompts (which are in the cache) included."""
    chats = [[{"role": "user", "content": f"{PROMPT} List {n}."}] for n in range(streams)]
    began = time.process_time()
    answers = llm.chat(chats, params)
    return sum(answer.completion_tokens for answer in answers) / (time.process_time() - began)


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure what a JSON Schema costs.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    constraint = Constraint(kind="json_schema", text=PEOPLE)
    print("| speculation | streams | free tok/CPU s | schema tok/CPU s | schema / free (quartiles) |")
    print("|---|---|---|---|---|")
    for speculate in ("off", "auto"):
        with LLM(args.model, threads=1, speculate=speculate) as llm:
            for streams in (1, 8):
                free: list[float] = []
                bound: list[float] = []
                for pair in range(args.pairs + 1):  # the first warms up
                    params = SamplingParams(
                        temperature=0.7, seed=pair, max_tokens=args.tokens, ignore_eos=True
                    )
                    with_schema = SamplingParams(
                        temperature=0.7, seed=pair, max_tokens=args.tokens, constraint=constraint
                    )
                    free.append(rate(llm, streams, params))
                    bound.append(rate(llm, streams, with_schema))
                ratios = [b / f for f, b in zip(free[1:], bound[1:], strict=True)]
                low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                print(
                    f"| {speculate} | {streams} | {median(free[1:]):.0f} | {median(bound[1:]):.0f} "
                    f"| {median(ratios):.2f} ({low:.2f} to {high:.2f}) |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    run_script(main)
