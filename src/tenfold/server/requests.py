"""Bodies of the OpenAI endpoints: what is accepted, in which range, and what is refused with which reason."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from tenfold.limits import MAX_LOGPROBS, RANGES, Range
from tenfold.protocol import SamplingParams
from tenfold.server.errors import ApiError, invalid
from tenfold.server.fields import Fields, check_integer, check_number, show

MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_TOKEN_DIGITS = 10
"""Of a token id that is written as a string."""
TEMPERATURE = msgspec.structs.replace(RANGES["temperature"], high=2.0)
"""The engine takes higher ones; OpenAI's API does not."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body. Exactly one of the three prompts is given."""

    params: SamplingParams
    """With a seed, always."""
    stream: bool
    include_usage: bool
    messages: list[dict[str, str]] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        return "prompt" if self.messages is None else "messages"


def parse_chat(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """The body of ``/v1/chat/completions``, as it came or taken apart. Raises `ApiError`."""
    fields = _fields(body, models)
    messages = _messages(fields.take("messages"))
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", _logprobs_range(vocab_size))
    if top is not None and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    max_tokens = _max_tokens(fields, "max_completion_tokens", "max_tokens")
    fields.only("tools", ([],), "tool calls are not supported yet")
    fields.only("tool_choice", ("none", "auto"), "tool calls are not supported yet")
    fields.only("parallel_tool_calls", (True, False), "tool calls are not supported yet")
    fields.only("response_format", ({"type": "text"},), "structured output is not supported yet")
    fields.only("modalities", (["text"],), "only text is supported")
    params = _params(fields, vocab_size, max_tokens, (top or 0) if wanted else None)
    stream, include_usage = _streaming(fields)
    fields.finish()
    return ApiRequest(params=params, stream=stream, include_usage=include_usage, messages=messages)


def parse_completion(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """The body of ``/v1/completions``, as it came or taken apart. Raises `ApiError`."""
    fields = _fields(body, models)
    text, token_ids = _prompt(fields.take("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", _logprobs_range(vocab_size))
    max_tokens = _max_tokens(fields, "max_tokens")
    fields.only("echo", (False,), "the prompt is not echoed")
    fields.only("best_of", (1,), "only best_of = 1 is supported")
    fields.only("suffix", ("",), "insertion is not supported")
    params = _params(fields, vocab_size, max_tokens, logprobs)
    stream, include_usage = _streaming(fields)
    fields.finish()
    return ApiRequest(
        params=params, stream=stream, include_usage=include_usage, text=text, token_ids=token_ids
    )


def _fields(body: bytes | Fields, models: tuple[str, ...]) -> Fields:
    fields = body if isinstance(body, Fields) else Fields(_decoded(body))
    model = fields.string("model")
    if model is not None and model not in models:
        raise ApiError(
            404,
            f"there is no model {show(model)} here; there is: {', '.join(models)}",
            param="model",
            code="model_not_found",
        )
    fields.string("user")  # a label of the client's own; nothing depends on it
    return fields


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body's JSON is nested too deeply", code="invalid_json") from None


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.boolean("stream")
    options = fields.take("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    if not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options is {show(options)}; it must be an object")
    for name, value in options.items():
        if name != "include_usage":
            raise invalid(
                f"stream_options.{name}", f"unknown field stream_options.{name}", code="unknown_parameter"
            )
        if value is not None and not isinstance(value, bool):
            raise invalid(
                "stream_options.include_usage",
                f"stream_options.include_usage is {show(value)}; it must be true or false",
            )
    return stream, bool(options.get("include_usage"))


def _params(fields: Fields, vocab_size: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    fields.only("n", (1,), "only n = 1 is supported for now")
    fields.only("store", (False,), "nothing is stored")
    fields.only("metadata", ({},), "nothing is stored")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    seed = fields.integer("seed", RANGES["seed"])
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, TEMPERATURE),
        top_p=fields.number("top_p", 1.0, RANGES["top_p"]),
        # -1 is how vLLM's clients say "off".
        top_k=max(0, fields.integer("top_k", Range(-1, vocab_size, "0 and -1 are off")) or 0),
        min_p=fields.number("min_p", 0.0, RANGES["min_p"]),
        repetition_penalty=fields.number("repetition_penalty", 1.0, RANGES["repetition_penalty"]),
        presence_penalty=fields.number("presence_penalty", 0.0, RANGES["presence_penalty"]),
        frequency_penalty=fields.number("frequency_penalty", 0.0, RANGES["frequency_penalty"]),
        logit_bias=_logit_bias(fields.take("logit_bias"), vocab_size),
        # Drawn here and not in the worker, so that another worker can carry on with the same noise.
        seed=secrets.randbits(63) if seed is None else seed & ((1 << 64) - 1),
        stop=_stop(fields.take("stop")),
        stop_token_ids=_token_ids("stop_token_ids", fields.take("stop_token_ids"), vocab_size),
        max_tokens=max_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )


def _logprobs_range(vocab_size: int) -> Range:
    return Range(0, min(MAX_LOGPROBS, vocab_size))


def _max_tokens(fields: Fields, *names: str) -> int | None:
    range = RANGES["max_tokens"]
    given = {name: value for name in names if (value := fields.integer(name, range)) is not None}
    if len(set(given.values())) > 1:
        raise invalid(names[0], f"{' and '.join(given)} differ; give one of them")
    return next(iter(given.values()), None)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop is {show(value)}; it must be a string or a list of up to {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise invalid("stop", f"stop[{index}] is {show(stop)}; it must be a string that is not empty")
    return tuple(stops)


def _token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(name, f"{name} is {show(value)}; it must be a list of token ids")
    ids = Range(0, vocab_size - 1)
    return tuple(check_integer(f"{name}[{i}]", item, ids) for i, item in enumerate(value))


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("logit_bias", f"logit_bias is {show(value)}; it must be an object: token id to number")
    bias = {}
    for key, number in value.items():
        digits = key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS
        if not digits or int(key) >= vocab_size:
            raise invalid(
                "logit_bias",
                f"logit_bias has the key {show(key)}; keys must be token ids from 0 to {vocab_size - 1}",
            )
        bias[int(key)] = check_number(f"logit_bias[{key}]", number, RANGES["logit_bias"])
    return bias


def _prompt(value: Any, vocab_size: int) -> tuple[str | None, tuple[int, ...] | None]:
    if value is None:
        raise invalid("prompt", "prompt is missing", code="missing_parameter")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value, None
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        other = next((i for i, item in enumerate(value) if type(item) is not type(value[0])), None)
        if other is not None:
            raise invalid(
                "prompt",
                f"prompt[{other}] is {show(value[other])}, and prompt[0] is not of that kind; a prompt is a "
                "string or a list of token ids",
            )
        raise invalid(
            "prompt",
            f"prompt has {len(value)} prompts; send one a request, they are batched all the same",
            code="unsupported_value",
        )
    if isinstance(value, list):
        ids = _token_ids("prompt", value, vocab_size)
        if not ids:
            raise invalid("prompt", "prompt is empty; it must have at least one token")
        return None, ids
    raise invalid("prompt", f"prompt is {show(value)}; it must be a string or a list of token ids")


def _messages(value: Any) -> list[dict[str, str]]:
    if value is None:
        raise invalid("messages", "messages is missing", code="missing_parameter")
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"messages is {show(value)}; it must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise invalid("messages", f"messages has {len(value)} messages; it must be at most {MAX_MESSAGES}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} is {show(value)}; it must be an object")
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {show(role)}; it must be one of {', '.join(ROLES)}")
    message = {"role": role, "content": _content(f"{where}.content", value.get("content"))}
    for name, item in value.items():
        if name in ("role", "content"):
            continue
        if name == "name":
            if item is not None:
                if not isinstance(item, str):
                    raise invalid(f"{where}.name", f"{where}.name is {show(item)}; it must be a string")
                message["name"] = item
        # A client that sends an answer back sends all of its fields, most of them null.
        elif name not in ("refusal", "tool_calls", "function_call", "audio", "annotations"):
            raise invalid(f"{where}.{name}", f"unknown field {where}.{name}", code="unknown_parameter")
        elif item not in (None, []):
            raise invalid(
                f"{where}.{name}",
                f"{where}.{name} is {show(item)}; only text is supported for now",
                code="unsupported_value",
            )
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(where, f"{where} is {show(value)}; it must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"{where}[{index}]",
                f'{where}[{index}] is {show(part)}; only {{"type": "text", "text": "..."}} is supported',
                code="unsupported_value",
            )
        for name in part:
            if name not in ("type", "text"):
                raise invalid(
                    f"{where}[{index}].{name}",
                    f"unknown field {where}[{index}].{name}",
                    code="unknown_parameter",
                )
        texts.append(part["text"])
    return "\n".join(texts)
