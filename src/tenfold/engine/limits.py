"""What an engine may take on, and what it refuses."""

from __future__ import annotations

import math

import msgspec

from tenfold.backends.base import PAGE_ROWS, ProgramInfo
from tenfold.protocol import Request, SamplingParams

MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for beside the drawn one; the OpenAI service's limit."""


class RequestError(ValueError):
    """A request that cannot be served. The message names the field, what is wrong with it, and the remedy."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much an engine does at once. Raises ValueError for a number below 1."""

    max_batch_tokens: int = 512
    """Most rows of a step, decode and prefill together; `ProgramInfo.max_rows` if that is less."""
    max_running: int = 64
    """Most sequences with KV pages; `ProgramInfo.max_logit_rows` or ``max_batch_tokens`` if that is less."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def check_request(request: Request, info: ProgramInfo) -> None:
    """Raises RequestError for a request that this program can never serve."""
    vocab = info.vocab_size
    if not request.prompt:
        raise RequestError("prompt: is empty; it must hold at least one token")
    for name, tokens in (
        ("prompt", request.prompt),
        ("output", request.output),
        ("stop_token_ids", request.params.stop_token_ids),
        ("eos_token_ids", request.eos_token_ids),
        ("logit_bias", tuple(request.params.logit_bias)),
    ):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise RequestError(f"{name}: token id {wrong} is not in the vocabulary (0 to {vocab - 1})")
    length = len(request.prompt)
    if length >= info.max_context:
        raise RequestError(
            f"prompt: has {length} tokens; the model's context is {info.max_context}, and at least one must "
            "be left to generate. Shorten the prompt"
        )
    memory = info.kv_pages * PAGE_ROWS
    if length + len(request.output) > memory:
        raise RequestError(
            f"prompt: {length + len(request.output)} tokens do not fit the KV memory, which holds {memory}. "
            "Shorten the prompt, or give the engine more KV pages"
        )
    _check_params(request.params, min(MAX_LOGPROBS, vocab))


def _check_params(params: SamplingParams, max_logprobs: int) -> None:
    temperature = params.temperature
    if temperature != 0:
        _check("temperature", temperature, 1e-6, 100.0, "or 0 for the most likely token")
    _check("top_k", params.top_k, 0, 2**31 - 1, "0 is off")
    _check("top_p", params.top_p, 1e-9, 1.0, "1 is off")
    _check("min_p", params.min_p, 0.0, 1.0, "0 is off")
    _check("repetition_penalty", params.repetition_penalty, 0.01, 100.0, "1 is off")
    _check("presence_penalty", params.presence_penalty, -2.0, 2.0, "0 is off")
    _check("frequency_penalty", params.frequency_penalty, -2.0, 2.0, "0 is off")
    for token, bias in params.logit_bias.items():
        if bias != -math.inf:
            _check(f"logit_bias of token {token}", bias, -100.0, 100.0, "or -inf to forbid it")
    if params.seed is not None:
        _check("seed", params.seed, -(2**63), 2**64 - 1, "a 64-bit integer, or none")
    if params.max_tokens is not None:
        _check("max_tokens", params.max_tokens, 1, 2**31 - 1, "or none, for up to the context's end")
    if params.logprobs is not None:
        _check("logprobs", params.logprobs, 0, max_logprobs, "or none")


def _check(name: str, value: float, low: float, high: float, note: str) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise RequestError(f"{name}: is {value}; it must be from {low} to {high} ({note})")
