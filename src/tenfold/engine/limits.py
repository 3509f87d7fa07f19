"""What an engine may take on, and what it refuses."""

from __future__ import annotations

import msgspec

from tenfold.backends.base import PAGE_ROWS, ProgramInfo
from tenfold.limits import RequestError, Unsupported, check_params, check_prompt, check_tokens
from tenfold.protocol import Request


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
    check_prompt(
        request.prompt,
        len(request.output),
        vocab,
        info.max_context,
        info.kv_pages * PAGE_ROWS,
        generates=request.pooling is None,
    )
    if request.pooling is not None:
        _check_pooled(request, info)
    check_tokens("output", request.output, vocab)
    check_tokens("eos_token_ids", request.eos_token_ids, vocab)
    check_params(request.params, vocab)
    try:
        request.namespace.encode()
    except UnicodeEncodeError:
        raise RequestError("namespace", f"is {request.namespace!r}; it must be valid Unicode") from None


def _check_pooled(request: Request, info: ProgramInfo) -> None:
    if not info.state_width:
        raise Unsupported("pooling", "is not supported: this model hands no hidden states back")
    if request.output:
        raise RequestError("output", "has tokens; with pooling none are generated")
    if (constraint := request.params.constraint) is not None:
        raise RequestError(constraint.field, "has nothing to constrain: with pooling no text is generated")
