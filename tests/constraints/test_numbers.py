"""Numbers of a schema are held exactly, or the schema is refused by the keyword."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.constraints.numbers import EXACT
from tenfold.limits import RequestError
from tests.helpers.constraints import SMALL, allowed, constraint, small_compiler

COMPILER = small_compiler()
EDGES = [0, 1, 9, 10, 99, 100, EXACT, EXACT + 1, EXACT + 2, 2**63 - 1, 2**63, 10**19, 10**30]
NUMBERS = st.one_of(
    st.integers(-120, 120),
    st.integers(-120_000, 120_000).map(lambda n: n / 1000),
    st.integers(-99, 99).map(lambda n: n / 10),
    st.sampled_from([*EDGES, *(-edge for edge in EDGES)]),
    st.sampled_from([-0.0, 0.05, 0.35, 0.45, 1e-9, 1e-5, 0.1 + 0.2, 1e16, 1e20, 1e300, 123456789.123456789]),
)
# Not many combine to large ones: these are right, and take the compiler seconds.
STEPS = st.one_of(
    st.integers(1, 40),
    st.integers(1, 60).map(lambda n: n / 10),
    st.sampled_from([0.01, 0.05, 0.25, 0.001, 1e-8, 1e-9, 1e-10, 0.07, 1.1, 2**32 - 1, 10**9, 0]),
)
ONE = st.fixed_dictionaries(
    {},
    optional={
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": STEPS,
    },
)
SCHEMAS = st.one_of(
    st.tuples(st.sampled_from(["integer", "number"]), ONE).map(lambda p: {"type": p[0], **p[1]}),
    st.tuples(st.sampled_from(["integer", "number"]), ONE, ONE).map(
        lambda p: {"type": p[0], "allOf": [p[1], p[2]]}
    ),
    st.lists(NUMBERS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    NUMBERS.map(lambda value: {"type": "integer", "const": value}),
)


def exact(value: Any) -> Fraction:
    """A number of a schema as it is written."""
    return Fraction(repr(value))


def keeps(schema: dict[str, Any], value: Fraction) -> bool:
    """Whether a number keeps to a schema of numbers, in exact arithmetic. (jsonschema's validators compare
    with floats where one is given.)"""
    holds: dict[str, Callable[[Any], bool]] = {
        "type": lambda kind: kind == "number" or value.denominator == 1,
        "minimum": lambda bound: value >= exact(bound),
        "maximum": lambda bound: value <= exact(bound),
        "exclusiveMinimum": lambda bound: value > exact(bound),
        "exclusiveMaximum": lambda bound: value < exact(bound),
        "multipleOf": lambda step: value % exact(step) == 0,
        "enum": lambda values: value in map(exact, values),
        "const": lambda one: value == exact(one),
        "allOf": lambda parts: all(keeps(part, value) for part in parts),
    }
    return all(holds[name](said) for name, said in schema.items())


def walks(schema: dict[str, Any], seed: int) -> list[Fraction]:
    """Values that come of random allowed tokens, where they come to an end. Raises RequestError."""
    dice = random.Random(seed)
    found = []
    for _ in range(4):
        matcher = COMPILER.begin(constraint("json_schema", schema))
        tokens: list[int] = []
        while len(tokens) < 40:
            may = allowed(matcher)
            end = not matcher.ends.isdisjoint(may)
            more = [token for token in may if token not in matcher.ends]
            if end and (not more or dice.random() < 0.4):
                found.append(Fraction(SMALL.decode(tokens)))
                break
            tokens.append(dice.choice(more))
            matcher.accept(tokens[-1])
    return found


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_is_taken_is_kept_exactly(schema: dict[str, Any], seed: int) -> None:
    """Whatever bounds, divisors and literals there are: an answer keeps to them, or the schema is refused by
    its place. A wrong number that ends with ``stop`` would be a broken promise."""
    try:
        values = walks(schema, seed)
    except RequestError as error:
        assert error.field.startswith("constraint")
        return
    for value in values:
        assert keeps(schema, value), (schema, value)
