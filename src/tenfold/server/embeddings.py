"""``/v1/embeddings``: its body, one input on its way, and its answer.

An input is a choice of a request as any other: what is special is that no token is drawn for it, and that its
one chunk has a vector. A vector is made JSON as it arrives, so that the answer to many takes no long moment
of the event loop.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tenfold.checkpoint.pooling import PoolingRule
from tenfold.config import PlanLine
from tenfold.limits import Range
from tenfold.protocol import Chunk, FinishReason, Pooling, PoolingKind, SamplingParams
from tenfold.server.answer_events import Delta, Finish, Usage, Whole
from tenfold.server.errors import ApiError, invalid
from tenfold.server.fields import Fields, show
from tenfold.server.prompts import parse_prompts
from tenfold.server.requests import ApiRequest, read_fields

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000
"""Of all inputs together; both are the OpenAI service's limits."""
POOLINGS: tuple[PoolingKind, ...] = ("mean", "last")
Encoding = Literal["float", "base64"]
ENCODINGS: tuple[Encoding, ...] = ("float", "base64")
DIMENSIONS = Range(1, 2**31 - 1)


class EmbeddingRequest(ApiRequest, frozen=True, kw_only=True):
    """A checked body. ``prompts`` are the inputs."""

    generates: bool = False
    listed: bool
    """The input is a list of inputs, and not one alone."""
    encoding: Encoding
    dimensions: int | None
    pooling: PoolingKind | None
    """None: as the model says."""
    normalize: bool

    @property
    def prompt_field(self) -> str:
        return "input"

    def blamed(self, error: ApiError, index: int) -> ApiError:
        """An error about the prompt that an input is, in the words of this API."""
        error.param = f"input[{index}]" if self.listed else "input"
        error.message = error.message.replace("prompt", error.param, 1).replace("the prompt", "it")
        return error

    def check_width(self, width: int) -> None:
        """Raises ApiError where vectors of another width are wanted."""
        if self.dimensions not in (None, width):
            raise invalid(
                "dimensions",
                f"dimensions is {self.dimensions}; vectors of this model have {width} and are not cut: "
                f"a part means nothing unless the model was trained for it. Leave it out, or give {width}",
                code="unsupported_value",
            )


def parse_embeddings(body: bytes | Fields, models: tuple[str, ...], vocab_size: int) -> EmbeddingRequest:
    """The body of ``/v1/embeddings``, as it came or taken apart. Raises `ApiError`."""
    fields = read_fields(body, models)
    given = fields.take("input")
    if given == []:
        raise invalid("input", "input is an empty list; it must have at least one text or list of token ids")
    inputs = parse_prompts(given, vocab_size, "input", MAX_INPUTS)
    listed = isinstance(given, list) and isinstance(given[0], str | list)
    for index, one in enumerate(inputs):
        if one == "":
            place = f"input[{index}]" if listed else "input"
            raise invalid(place, f"{place} is an empty string, which has no embedding; leave it out")
    fields.string("user")  # a label of the client's own; nothing depends on it
    request = EmbeddingRequest(
        params=SamplingParams(seed=0),
        stream=False,
        include_usage=False,
        prompts=inputs,
        listed=listed,
        encoding=_one_of(fields, "encoding_format", ENCODINGS) or "float",
        dimensions=fields.integer("dimensions", DIMENSIONS),
        pooling=_one_of(fields, "pooling", POOLINGS),
        normalize=fields.boolean("normalize", True),
    )
    fields.finish()
    return request


def _one_of(fields: Fields, name: str, known: tuple[Any, ...]) -> Any:
    value = fields.take(name)
    if value is not None and value not in known:
        names = " or ".join(f'"{one}"' for one in known)
        raise invalid(name, f"{name} is {show(value)}; it must be {names}")
    return value


class EmbeddingAnswer:
    """One input: its news as deltas. See `tenfold.server.answer.Answer`."""

    completion_tokens = reasoning_tokens = steps = step_tokens = 0

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.finish: Finish | None = None
        self.engine_finish: FinishReason | None = None
        self.error: str | None = None
        self.error_field: str | None = None
        self.cached_tokens: int | None = None
        self.queue_ms: float | None = None

    def push(self, chunks: Iterable[Chunk]) -> Delta:
        """Takes news in order. The last delta has the vector and `Finish`, unless the engine failed."""
        delta = Delta()
        for chunk in chunks:
            if self.cached_tokens is None:
                self.cached_tokens, self.queue_ms = chunk.cached_tokens, chunk.queue_ms
            self.engine_finish, self.error, self.error_field = chunk.finish, chunk.error, chunk.error_field
            if chunk.embedding is not None:
                self.finish = Finish("stop")
                delta.events.append(self.finish)
                delta.embedding = vector_json(chunk.embedding, self._encoding)
        return delta


def vector_json(data: bytes, encoding: Encoding) -> bytes:
    """A vector of little-endian float32 as JSON: nine digits each, which is exact for float32."""
    if encoding == "base64":
        return b'"' + base64.b64encode(data) + b'"'
    count = len(data) // 4
    return ("[" + ",".join(["%.9g"] * count) % struct.unpack(f"<{count}f", data) + "]").encode()


class EmbeddingShape:
    """The answer as one JSON object; there are no streams."""

    def __init__(self, model: str) -> None:
        self._model = model

    def opening(self, index: int, usage: Usage) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return b""

    def closing(self, index: int, finish: Finish) -> bytes:
        return b""

    def ending(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error.body()

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        vectors = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, choice.embedding)
            for index, choice in enumerate(choices)
        ]
        tail = msgspec.json.encode({"model": self._model, "usage": usage_object(usage)})
        return b'{"object":"list","data":[' + b",".join(vectors) + b"]," + tail[1:]


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's, and what came from the cache as its other APIs say it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def plan_line(rule: PoolingRule) -> PlanLine:
    """For the plan."""
    return PlanLine("pooling of embeddings", rule.kind or "as each request says", rule.why)


def pooling_of(request: EmbeddingRequest, rule: PoolingRule) -> Pooling:
    """What the engine is asked for. Raises ApiError where the model has no default that can be had."""
    kind = request.pooling or rule.kind
    if kind is None:
        raise invalid(
            "pooling",
            f'pooling must be given for this model, as "mean" or "last": {rule.why}',
            code="unsupported_value",
        )
    return Pooling(kind=kind, normalize=request.normalize)
