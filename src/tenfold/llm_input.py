"""What callers hand to an `LLM`: checked before anything is computed, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec

from tenfold.checkpoint.pooling import PoolingRule
from tenfold.limits import PromptTooLong
from tenfold.protocol import Pooling, SamplingParams
from tenfold.server.messages import ROLES

Prompt = str | Sequence[int]
"""Text, or token ids."""


def as_prompts(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """One prompt or several, as a list. Raises TypeError for anything else."""
    if isinstance(prompts, str) or (_is_list(prompts) and len(prompts) > 0 and _is_token(prompts[0])):
        return [as_prompt(name, prompts)]
    if not _is_list(prompts):
        raise TypeError(
            f"{name} is {_show(prompts)}; it must be a prompt (text or token ids) or a list of them"
        )
    return [as_prompt(f"{name}[{index}]", prompt) for index, prompt in enumerate(prompts)]


def as_prompt(name: str, prompt: Any) -> Prompt:
    """A text, or token ids as plain integers. Raises TypeError for anything else."""
    if isinstance(prompt, str):
        return prompt
    if not _is_list(prompt):
        raise TypeError(f"{name} is {_show(prompt)}; it must be text or a list of token ids")
    for index, token in enumerate(prompt):
        if not _is_token(token):
            raise TypeError(f"{name}[{index}] is {_show(token)}; it must be a token id")
    return [int(token) for token in prompt]


def as_messages(name: str, messages: Any) -> list[dict[str, Any]]:
    """A conversation. Raises TypeError or ValueError for what is none, or is empty, as the HTTP API does."""
    if not _is_list(messages):
        raise TypeError(f"{name} is {_show(messages)}; it must be a list of messages")
    if not len(messages):
        raise ValueError(f"{name} is empty; it must have at least one message")
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{where} is {_show(message)}; it must be a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{where}['role'] is {_show(role)}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise TypeError(f"{where}['content'] is {_show(content)}; it must be a string")
    return [dict(message) for message in messages]


def as_params(params: Any) -> SamplingParams:
    """The parameters, of the types that they should have; None stands for the defaults.

    Raises TypeError for a wrong type, ValueError for a stop string that is empty. The engine checks ranges.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is {_show(params)}; it must be one SamplingParams, for all prompts")
    try:
        checked = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"params: {error}") from None
    for index, stop in enumerate(checked.stop):
        if not stop:
            raise ValueError(f"params.stop[{index}] is empty; a stop string must have at least one character")
    return checked


def as_pooling(pooling: Any, normalize: Any, rule: PoolingRule) -> Pooling:
    """How texts are embedded. Raises TypeError or ValueError, also where the model's own way is not there."""
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize is {_show(normalize)}; it must be True or False")
    if pooling is None and rule.kind is None:
        raise ValueError(f"pooling must be given for this model, as 'mean' or 'last': {rule.why}")
    kind = rule.kind if pooling is None else pooling
    if kind not in ("mean", "last"):
        raise ValueError(f"pooling is {_show(pooling)}; it must be 'mean' or 'last'")
    return Pooling(kind=kind, normalize=normalize)


def check_room(prompt_tokens: int, params: SamplingParams, context: int) -> None:
    """Raises PromptTooLong when the context cannot hold the prompt and all that is asked for."""
    wanted = params.max_tokens or 0
    if prompt_tokens < context < prompt_tokens + wanted:  # of a prompt without any room the engine says so
        raise PromptTooLong(
            "prompt",
            f"has {prompt_tokens} tokens and {wanted} were asked for; the model's context is {context}. "
            "Shorten the prompt, or lower max_tokens",
        )


def _is_list(value: Any) -> bool:
    """A sequence, or what behaves like one, as numpy's arrays do."""
    return (
        not isinstance(value, str | bytes | Mapping)
        and hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
