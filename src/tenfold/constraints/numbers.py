"""Which numbers of a JSON Schema the compiler holds exactly; any other is refused here.

llguidance (1.9.1) reads bounds and literals as float64, makes int64 of an integer's bounds (clamping them),
and counts remainders for ``multipleOf`` in 32 bits without a check. Beyond what these hold it would let
through a wrong number without a word, or overflow its stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from tenfold.limits import RequestError

EXACT = 2**53 - 1
"""Integers up to here, and their neighbours, are float64s; what JSON can be relied upon for (RFC 8259, 6)."""
MAX_DIGITS = 15
MAX_PLACES = 22
"""Of a number with a point. Beyond them the library's reader of JSON may be off by the last bit: it
multiplies or divides a float64 by a power of ten, which is right where both are exact (Clinger 1990)."""
_RANGE = (
    f"integers from -{EXACT} to {EXACT}, and numbers within these of {MAX_DIGITS} digits and {MAX_PLACES} "
    "decimals"
)
MAX_DIVISOR = 10**8
"""Of a ``multipleOf`` without its point: ten times it, and a digit more, is still a number of 32 bits."""
MAX_DECIMALS = 8
"""Of a ``multipleOf``; for the same reason."""
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


def check_bound(where: str, value: Any) -> None:
    """Of one of `BOUNDS`. Raises RequestError for what is no number or not held exactly."""
    if isinstance(value, bool) and "exclusive" in where.rpartition(".")[2]:  # draft 4
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(where, "must be a number")
    if not _exact(value):
        raise RequestError(where, f"is beyond what is held exactly: {_RANGE}. Leave it out, or round it")


def check_literals(where: str, value: Any) -> None:
    """Of ``const`` or ``enum``, and all within it. Raises RequestError for a number not held exactly."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, int | float) and not _exact(value):
            raise RequestError(
                where, f"has a number beyond what is held exactly: {_RANGE}. Round it, or make it a string"
            )


def _exact(value: float) -> bool:
    if abs(value) > EXACT:
        return False
    if isinstance(value, int):
        return True
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return len(digits) <= MAX_DIGITS and exponent >= -MAX_PLACES


def check_multiple(where: str, value: Any) -> Decimal:
    """``multipleOf`` as it is written. Raises RequestError for what is not above 0 or not held exactly."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise RequestError(where, "must be a number above 0")
    exact = Decimal(repr(value))
    if not _held(exact, float(value) if value <= EXACT else math.inf):
        raise RequestError(
            where,
            f"is {value}, which is not held exactly: it may have {MAX_DECIMALS} decimals and be up to "
            f"{MAX_DIVISOR} without its point, and some others (0.07) are not held either. Take "
            "another, or an enum of the values",
        )
    return exact


def _held(exact: Decimal, value: float) -> bool:
    """Whether the compiler comes to the same number, by multiplying by ten until it is an integer."""
    decimals = 0
    while value % 1 and decimals <= MAX_DECIMALS:
        value *= 10
        decimals += 1
    if value > MAX_DIVISOR or decimals > MAX_DECIMALS:
        return False
    return Decimal(int(value)).scaleb(-decimals) == exact


class Side(NamedTuple):
    """The stricter bound of one side of a range."""

    value: Decimal
    excluded: bool
    """Itself."""


class Span(NamedTuple):
    """The bounds of a schema, together."""

    low: Side | None
    high: Side | None


def check_range(place: str, schema: dict[str, Any]) -> Span:
    """The bounds of one schema, each of which was checked alone; none of integers, for `check_open`. Raises
    RequestError where nothing lies between them, or where the compiler would find less than does, or more."""
    low = _side(schema, "minimum", "exclusiveMinimum", max)
    high = _side(schema, "maximum", "exclusiveMaximum", min)
    if "multipleOf" in schema:
        _check_steps(place, schema, low, high)
    span = Span(None, None) if schema.get("type") == "integer" else Span(low, high)
    check_open(place, [span])
    return span


def check_open(place: str, spans: Sequence[Span]) -> None:
    """Bounds that may come together. Raises RequestError where the compiler forgets that one is excluded: as
    it does with an integer, and the other bound in the unit next to it."""
    for low in (span.low for span in spans if span.low is not None):
        for high in (span.high for span in spans if span.high is not None):
            for near, far, name in ((low, high, "exclusiveMinimum"), (high, low, "exclusiveMaximum")):
                outward = near.value >= 0 if near is low else near.value <= 0
                if near.excluded and outward and low.value < high.value and int(far.value) == near.value:
                    raise RequestError(
                        f"{place}.{name}",
                        f"cannot be enforced with a bound at {far.value:f}, less than 1 away. Say it without "
                        f"excluding, as by {name.replace('exclusiveM', 'm')} with the number nearest to "
                        f"{near.value:f} that is wanted",
                    )


def _check_steps(place: str, schema: dict[str, Any], low: Side | None, high: Side | None) -> None:
    step = Decimal(repr(schema["multipleOf"]))
    first = None if low is None else _multiple_at(low, step, up=True)
    last = None if high is None else _multiple_at(high, step, up=False)
    if first is not None and last is not None and first > last:
        raise RequestError(place, f"leaves no number: no multiple of {step} lies within its bounds")
    for name in BOUNDS & schema.keys():
        value = schema[name]
        if isinstance(value, bool):
            continue
        if -_exponent(Decimal(repr(value))) > max(0, -_exponent(step)) > 0:
            multiple = first if name.lower().endswith("minimum") else last
            instead = name.replace("exclusiveM", "m")
            raise RequestError(
                f"{place}.{name}",
                f"has more decimals than multipleOf {step}, which cannot be enforced together. The same is "
                f"said by {instead} {multiple:f}",
            )


def _side(
    schema: dict[str, Any],
    inclusive: str,
    exclusive: str,
    strictest: Callable[[Iterable[Decimal]], Decimal],
) -> Side | None:
    found: list[Side] = []
    other = schema.get(exclusive)
    if inclusive in schema:
        found.append(Side(Decimal(repr(schema[inclusive])), other is True))
    if other is not None and not isinstance(other, bool):
        found.append(Side(Decimal(repr(other)), True))
    if not found:
        return None
    value = strictest(side.value for side in found)
    return Side(value, any(side.excluded for side in found if side.value == value))


def _multiple_at(side: Side, step: Decimal, *, up: bool) -> Decimal:
    """The multiple nearest to a bound, on its inner side."""
    bound = side.value
    scale = max(0, -_exponent(bound), -_exponent(step))
    number, divisor = int(bound.scaleb(scale)), int(step.scaleb(scale))
    count = -(-number // divisor) if up else number // divisor
    if side.excluded and count * divisor == number:
        count += 1 if up else -1
    return count * step


def _exponent(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent


def check_multiples(field: str, steps: Iterable[Decimal]) -> None:
    """All that one document has, where schemas are combined: the compiler may have to find their least common
    multiple. Raises RequestError where it could not."""
    several = set(steps)
    scale = max((max(0, -_exponent(step)) for step in several), default=0)
    numbers = [int(step.scaleb(scale)) for step in several]
    if len(numbers) > 1 and math.lcm(*numbers) * max(numbers) >= 2**32:
        listed = ", ".join(map(str, sorted(several)[:4]))
        raise RequestError(
            field,
            f"combines schemas and has several multipleOf ({listed}) whose least common multiple is not held "
            "exactly. Use one multipleOf, or smaller ones",
        )
