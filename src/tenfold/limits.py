"""What a request may ask for: one definition for the front that takes it and the engine that serves it."""

from __future__ import annotations

import math
import re

import msgspec

from tenfold.protocol import SamplingParams

MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for beside the drawn one; the OpenAI service's limit."""


class RequestError(ValueError):
    """A request that cannot be served.

    ``field`` names what is wrong, as clients write it (``logit_bias[5]``); the message begins with it, and
    says what is wrong and what would do.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class PromptTooLong(RequestError):
    """The prompt does not fit the model's context or the engine's memory; a shorter one would.

    ``problem`` is what it has. Programs know the case by the words "prompt is too long", Anthropic's.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, f"is too long: it {problem}")


class BeyondMemory(PromptTooLong):
    """It has more tokens than the KV memory holds here; where there is more, it may be served."""


class Unsupported(RequestError):
    """What is asked for is understood, and not supported."""


_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


def json_problem(error: Exception, data: bytes = b"") -> str:
    """What is wrong with ``data``, which is no JSON, for people."""
    text = str(error)
    for escape in _ESCAPES.finditer(data):
        if half := escape["half"]:  # the decoder calls some of these truncated
            return (
                f"it has \\{half.decode()} (byte {escape.start()}), half of a pair of escapes that means one "
                "character; send both halves, or the character itself"
            )
    if text.startswith("Number out of range"):
        return "it has a number that is too large for JSON here: numbers go up to 1.8e308"
    if text.startswith("Integer value out of range"):
        return "it has an integer of more digits than are read"
    return text


class Range(msgspec.Struct, frozen=True):
    """The numbers that a parameter may be: from ``low`` to ``high``, and ``also``. NaN is in no range."""

    low: float
    high: float
    note: str = ""
    """What a value means, or what else would do: for people, behind the range."""
    also: float | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high or value == self.also

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"from {_short(self.low)} to {_short(self.high)}{note}"


RANGES = {
    "temperature": Range(1e-6, 100.0, "or 0 for the most likely token", also=0.0),
    "top_k": Range(0, 2**31 - 1, "0 is off"),
    "top_p": Range(1e-9, 1.0, "1 is off"),
    "min_p": Range(0.0, 1.0, "0 is off"),
    "repetition_penalty": Range(0.01, 100.0, "1 is off"),
    "presence_penalty": Range(-2.0, 2.0, "0 is off"),
    "frequency_penalty": Range(-2.0, 2.0, "0 is off"),
    "logit_bias": Range(-100.0, 100.0, "or -inf to forbid the token", also=-math.inf),
    "seed": Range(-(2**63), 2**64 - 1, "64 bits, signed or not"),
    "max_tokens": Range(1, 2**31 - 1, "or none, for up to the context's end"),
    "logprobs": Range(0, MAX_LOGPROBS, "or none"),
}
"""By name of a field of SamplingParams; logit_bias is of each bias. What may be None may be that too."""


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for the first parameter that is out of range."""
    for token, bias in params.logit_bias.items():
        check_tokens("logit_bias", (token,), vocab_size)
        _check(f"logit_bias[{token}]", bias, RANGES["logit_bias"])
    check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    for name, range in RANGES.items():
        value = getattr(params, name)
        if name != "logit_bias" and value is not None:
            _check(name, value, range)
    if params.constraint is not None and params.ignore_eos:
        raise RequestError(
            "ignore_eos",
            f"is true, but with {params.constraint.field} the answer ends where its text is complete",
        )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestError("logprobs", f"is {params.logprobs}; the vocabulary has {vocab_size} tokens")


def check_prompt(
    prompt: tuple[int, ...],
    output: int,
    vocab_size: int,
    context: int,
    kv_tokens: int,
    *,
    generates: bool = True,
) -> None:
    """Raises RequestError for a prompt that can never be computed, PromptTooLong if that is for its length:
    BeyondMemory where it is the KV memory that is too small.

    ``output``: tokens generated already, when the request is resumed. ``context`` is the model's, in tokens;
    ``kv_tokens`` are those that the KV memory holds. One that ``generates`` nothing may fill the context.
    """
    length = len(prompt)
    if not prompt:
        raise RequestError("prompt", "is empty; it must hold at least one token")
    check_tokens("prompt", prompt, vocab_size)
    if length > context and not generates:
        raise PromptTooLong(
            "prompt", f"has {length} tokens; the model's context is {context}. Shorten the prompt"
        )
    if length >= context and generates:
        raise PromptTooLong(
            "prompt",
            f"has {length} tokens; the model's context is {context}, and at least one must be left to "
            "generate. Shorten the prompt",
        )
    if length + output > kv_tokens:
        raise BeyondMemory(
            "prompt",
            f"has {length + output} tokens; they do not fit the KV memory, which holds {kv_tokens}. "
            "Shorten the prompt, or give the engine more KV memory",
        )


def check_tokens(field: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    """Raises RequestError for a token id that is not in the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(
            field, f"has the token id {wrong}, which is not in the vocabulary (0 to {vocab_size - 1})"
        )


def _check(field: str, value: float, range: Range) -> None:
    if value not in range:
        raise RequestError(field, f"is {value}; it must be {range}")


def _short(number: float) -> str:
    """1e-06, 100, and whole numbers digit by digit."""
    return str(number) if isinstance(number, int) else f"{number:g}"
