"""1,000 answers over 50 JSON Schemas: every one that was not cut must be valid.

    python benchmarks/structured_validity.py
    python benchmarks/structured_validity.py --model model.gguf --answers 200 --no-speculate

Answers are drawn at temperatures from 0 to 1.5, several of a schema at a time, and validated by the package
jsonschema, formats too. The exit code is 1 when an answer is not valid, ends in any other way than by its
end or its length, or when so many were cut that little was shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import jsonschema

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tenfold import LLM
from tenfold.bench.script import run_script
from tenfold.protocol import Constraint, SamplingParams
from tests.helpers.schemas import SCHEMAS

TEMPERATURES = (0.0, 0.5, 1.0, 1.5)


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Validate answers that were constrained by JSON Schemas.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--no-speculate", action="store_true")
    args = parser.parse_args()
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    speculate = "off" if args.no_speculate else "auto"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    each = -(-args.answers // (len(SCHEMAS) * len(TEMPERATURES)))
    with LLM(args.model, threads=args.threads, speculate=speculate) as llm:
        for index, schema in enumerate(SCHEMAS):
            text = json.dumps(schema)
            asked = [f"Write example {n} of JSON for this schema: {text}" for n in range(each)]
            for temperature in TEMPERATURES:
                params = SamplingParams(
                    temperature=temperature,
                    seed=index,
                    max_tokens=args.max_tokens,
                    constraint=Constraint(kind="json_schema", text=text),
                )
                for answer in llm.chat([[{"role": "user", "content": one}] for one in asked], params):
                    ends[str(answer.finish_reason)] += 1
                    if answer.finish_reason != "stop":
                        continue
                    try:
                        jsonschema.validate(json.loads(answer.text), schema, format_checker=checker)
                    except (ValueError, jsonschema.ValidationError) as error:
                        wrong.append(f"schema {index}, temperature {temperature}: {answer.text!r}: {error}")
    total = sum(ends.values())
    print(f"{total} answers over {len(SCHEMAS)} schemas: {dict(ends)}; {len(wrong)} not valid")
    print("\n".join(wrong))
    return int(bool(wrong) or not set(ends) <= {"stop", "length"} or ends["stop"] < 0.9 * total)


if __name__ == "__main__":
    run_script(main)
