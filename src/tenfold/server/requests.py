"""Bodies of the OpenAI endpoints: what is accepted, in which range, and what is refused with which reason."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from tenfold.json_body import DuplicateKey, decode_json
from tenfold.limits import MAX_LOGPROBS, RANGES, Range
from tenfold.protocol import SamplingParams
from tenfold.server.constraints import take_constraint
from tenfold.server.errors import ApiError, invalid
from tenfold.server.fields import Fields, check_number, show, token_ids
from tenfold.server.messages import parse_messages
from tenfold.server.prompts import MAX_CHOICES, parse_prompts
from tenfold.server.tools import ToolUse, parse_tools

MAX_STOPS = 16
MAX_TOKEN_DIGITS = 10
"""Of a token id that is written as a string."""
TEMPERATURE = msgspec.structs.replace(RANGES["temperature"], high=2.0)
"""The engine takes higher ones; OpenAI's API does not."""
SEEDS = 1 << 64


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body. Either ``messages`` or ``prompts`` are given."""

    params: SamplingParams
    """With a seed, always: that of a prompt's first choice. See `seed_of`."""
    stream: bool
    include_usage: bool
    n: int = 1
    """Choices for each prompt."""
    messages: list[dict[str, Any]] | None = None
    tools: ToolUse | None = None
    template_variables: dict[str, Any] = {}
    """What else the chat template is to be told."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or token ids."""
    echo: bool = False
    """The prompt comes before the text."""
    thinking: bool | None = None
    """Whether the model is to reason before it answers; None: as it does by itself."""
    generates: bool = True
    """False: embeddings are wanted, and no text."""
    names: dict[str, str] = {}
    """What fields, or parts of their paths, are called here where the chat API calls them otherwise."""

    def name(self, field: str) -> str:
        """What this API calls a field of the chat API."""
        return self.names.get(field, field)

    def in_own_words(self, error: ApiError) -> ApiError:
        """An error about a field that was named as the chat API names it."""
        for name, own in self.names.items():
            if error.param is not None and name in error.param:
                error.param = error.param.replace(name, own, 1)
                error.message = error.message.replace(name, own, 1)
                break
        return error

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        return "prompt" if self.messages is None else self.name("messages")

    def params_of(self, choice: int) -> SamplingParams:
        """Of a prompt's choice: choice i has the seed plus i, so it is what a request of its own with that
        seed would get."""
        seed = ((self.params.seed or 0) + choice) % SEEDS
        return msgspec.structs.replace(self.params, seed=seed) if choice else self.params


def parse_chat(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """The body of ``/v1/chat/completions``, as it came or taken apart. Raises `ApiError`."""
    fields = open_body(body, models)
    messages = parse_messages(fields.take("messages"))
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", _logprobs_range(vocab_size))
    if top is not None and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    max_tokens = _max_tokens(fields, "max_completion_tokens", "max_tokens")
    tools = parse_tools(fields)
    fields.only("modalities", (["text"],), "only text is supported")
    fields.only("audio", (), "only text is supported")
    fields.only("prediction", (), "speculation drafts from its own sources; see the documentation")
    fields.only("web_search_options", (), "the server searches nothing")
    fields.only("verbosity", ("medium",), "models here know no such setting; say it in a message")
    params = _params(fields, vocab_size, max_tokens, (top or 0) if wanted else None)
    n = fields.integer("n", Range(1, MAX_CHOICES)) or 1
    variables = template_variables(fields)
    stream, include_usage = _streaming(fields)
    fields.finish()
    return ApiRequest(
        params=params,
        stream=stream,
        include_usage=include_usage,
        n=n,
        messages=messages,
        tools=tools,
        template_variables=variables,
    )


def parse_completion(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> ApiRequest:
    """The body of ``/v1/completions``, as it came or taken apart. Raises `ApiError`."""
    fields = open_body(body, models)
    prompts = parse_prompts(fields.take("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", _logprobs_range(vocab_size))
    max_tokens = _max_tokens(fields, "max_tokens")
    echo = fields.boolean("echo")
    if echo and logprobs is not None:
        raise invalid(
            "echo",
            "echo with logprobs would need those of the prompt, which are not computed; leave one out",
            code="unsupported_value",
        )
    n = fields.integer("n", Range(1, MAX_CHOICES)) or 1
    fields.only(
        "best_of", (n,), f"only best_of = n ({n}) is supported: no choice is computed to be thrown away"
    )
    if n * len(prompts) > MAX_CHOICES:
        raise invalid(
            "n", f"n is {n} for {len(prompts)} prompts; a request can have up to {MAX_CHOICES} choices in all"
        )
    fields.only("suffix", ("",), "insertion is not supported")
    params = _params(fields, vocab_size, max_tokens, logprobs)
    stream, include_usage = _streaming(fields)
    fields.finish()
    return ApiRequest(
        params=params, stream=stream, include_usage=include_usage, n=n, prompts=prompts, echo=echo
    )


def read_fields(body: bytes | Fields, models: tuple[str, ...]) -> Fields:
    """The fields of a body that is for one of the models. Raises `ApiError`."""
    fields = body if isinstance(body, Fields) else decode_body(body)
    model = fields.string("model")
    if model is not None and model not in models:
        raise ApiError(
            404,
            f"there is no model {show(model)} here; there is: {', '.join(models)}",
            param="model",
            code="model_not_found",
        )
    return fields


def decode_body(body: bytes) -> Fields:
    """The fields of a body, before anybody knows what it is for. Raises `ApiError`."""
    try:
        data = decode_json(body)
    except ValueError as error:
        param = error.key if isinstance(error, DuplicateKey) else None
        raise ApiError(400, f"the body {error}", param=param, code="invalid_json") from None
    return Fields(data, len(body))


def open_body(body: bytes | Fields, models: tuple[str, ...]) -> Fields:
    """A body taken apart, and the fields of all of OpenAI's APIs: the model and labels. Raises `ApiError`."""
    fields = read_fields(body, models)
    take_labels(fields)
    return fields


def take_labels(fields: Fields) -> None:
    """What OpenAI's APIs take and nothing depends on."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.string(name)  # labels of the client's own; nothing depends on them
    fields.only(
        "prompt_cache_retention", ("in_memory", "in-memory"), "the cache keeps what there is room for"
    )
    _metadata(fields.take("metadata"))


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
    fields.only("store", (False,), "nothing is stored")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    seed = fields.integer("seed", RANGES["seed"])
    constraint = take_constraint(fields)
    ignore_eos = fields.boolean("ignore_eos")
    if constraint is not None and ignore_eos:
        raise invalid("ignore_eos", f"ignore_eos is true, but {constraint.field} says where the answer ends")
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
        seed=seed_or_new(seed),
        stop=_stop(fields.take("stop")),
        stop_token_ids=token_ids("stop_token_ids", fields.take("stop_token_ids"), vocab_size),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        constraint=constraint,
    )


def seed_or_new(seed: int | None) -> int:
    """A seed of 64 bits. It is drawn here and not in the worker, so that another worker can carry on with the
    same noise."""
    return secrets.randbits(63) if seed is None else seed % SEEDS


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


def _metadata(value: Any) -> None:
    """As OpenAI checks it; nothing depends on it."""
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > 16:
        raise invalid("metadata", f"metadata is {show(value)}; it must be an object of up to 16 strings")
    for key, item in value.items():
        if len(key) > 64 or not isinstance(item, str) or len(item) > 512:
            raise invalid(
                f"metadata.{key[:64]}",
                f"metadata has {show(key)}: {show(item)}; keys are up to 64 characters, values strings of up "
                "to 512",
            )


def template_variables(fields: Fields) -> dict[str, Any]:
    """``chat_template_kwargs``, and ``reasoning_effort`` for the templates that know it."""
    value = fields.take("chat_template_kwargs")
    if value is not None and not isinstance(value, dict):
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs is {show(value)}; it must be an object of variables",
        )
    variables: dict[str, Any] = dict(value or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise invalid(
                f"chat_template_kwargs.{name}", f"chat_template_kwargs.{name} is not for this field to give"
            )
    effort = fields.string("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables
