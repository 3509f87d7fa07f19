"""What a format of tool calls is, and what is between a reader of them and who asks it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec


class PromptText(Protocol):
    """How calls are asked for and told of where a chat template knows nothing of tools."""

    def system(self, tools: Sequence[dict[str, Any]]) -> str:
        """What the system message says of the tools, in OpenAI's form."""
        ...

    def calls(self, calls: Sequence[dict[str, Any]]) -> str:
        """Calls as the model itself would write them; each has ``name`` and ``arguments``."""
        ...

    def results(self, results: Sequence[str]) -> str:
        """What tools answered, one text a call."""
        ...


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format. All are JSON behind a marker: a call is an object with a name and arguments, several calls
    are a list or one section each. The reader (`calls.CallReader`) takes both from every format, for models
    do not keep to one."""

    name: str
    markers: tuple[str, ...]
    """Each of them begins a section of calls."""
    end: str | None = None
    """What ends a section; None: a section ends with its calls."""
    separator: str = ""
    """What may stand between two calls of a section that is no list."""
    bare: bool = False
    """A call may also stand without a marker where it is the first thing that the answer says."""
    header: bool = False
    """The name may stand before the arguments instead of in one object with them: ``name[ARGS]{...}``."""
    tokens: tuple[str, ...] = ()
    """Names of tokens that belong to the format, beside the markers: control tokens in most models, and so
    invisible where nobody asks for them."""
    short_ids: bool = False
    """The chat template takes ids of nine letters and digits alone."""
    prompt: PromptText | None = None
    """None: nothing but the model's own template can ask for calls in this format."""

    def new_id(self) -> str:
        """The id of a call."""
        if self.short_ids:
            letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
            return "".join(secrets.choice(letters) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class Sink(Protocol):
    """Who is told of calls."""

    def call_begins(self, name: str) -> None: ...

    def call_goes_on(self, arguments: str) -> None: ...

    def call_ends(self) -> bool:
        """True: no further call is wanted."""
        ...


class State(Enum):
    """Where a reader stands."""

    READING = auto()
    CLOSED = auto()
    """The section is over; what follows is no part of it."""
    FAULT = auto()
    """The text read is no call; what follows is no part of it either."""
