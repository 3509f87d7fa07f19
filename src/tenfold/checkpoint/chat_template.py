"""A conversation as the text that the model was trained on, by the model's own Jinja template.

Templates are written for transformers' `apply_chat_template`; what they find there they find here. A template
comes with a model file and is not trusted: it runs in jinja2's sandbox, reads only what it is given, and what
it may loop, call and multiply is bounded. (It can still waste memory on purpose, by doubling a string; who
serves a model trusts its file that far.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import read_regular
from tenfold.checkpoint.tokenizer_folder import read_json_object

_MAX_STEPS = 4_000_000
_CALL_STEPS = 10
_MAX_REPEATED = 1_000_000
_BUDGET = "_tenfold_budget"
_RESERVED = {"raise_exception", "strftime_now", "messages", "tools", "add_generation_prompt", _BUDGET}


class TemplateError(ValueError):
    """The template refuses this conversation, or fails on it. The message is fit for the client who sent
    it."""


class _Refusal(jinja2.TemplateError):
    """What a template says by ``raise_exception``."""


class _Budget:
    """How many steps one rendering has left: a round of a loop is one, a call ten, so a step is about 0.3
    us."""

    def __init__(self) -> None:
        self.left = _MAX_STEPS

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise SecurityError(f"it takes over {_MAX_STEPS:,} steps")


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds on loops (see `_bound_loops`), on calls and on ``*`` and ``**``."""

    intercepted_binops = frozenset(("*", "**"))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[_BUDGET].spend(_CALL_STEPS)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("it uses **")
        for count, repeated in ((left, right), (right, left)):
            if (
                isinstance(count, int)
                and hasattr(repeated, "__len__")
                and count * len(repeated) > _MAX_REPEATED
            ):
                raise SecurityError(f"it repeats something to over {_MAX_REPEATED:,} items")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _bound_loops(super()._parse(source, name, filename))


def _bound_loops(tree: nodes.Template) -> nodes.Template:
    """Every ``for x in y`` becomes ``for x in y|_bounded``."""
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_bounded", [], [], None, None, lineno=loop.lineno)
    return tree


@jinja2.pass_context
def _bounded(context: Context, items: Any) -> Any:
    budget: _Budget = context.parent[_BUDGET]

    def spending(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            budget.spend(1)
            yield item

    # Counted beforehand where a loop may ask for its length (loop.last), so that it need not be kept a second
    # time.
    if isinstance(items, list | tuple | dict | str | range):
        budget.spend(len(items))
        return items
    return items if isinstance(items, jinja2.Undefined) else spending(items)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own ``tojson``: nothing is escaped for HTML, and keys keep their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise _Refusal(str(message))


class ChatTemplate:
    """A model's chat template, compiled. Safe to use from several threads.

    ``source``: the template, or several by name: then ``tool_use`` is for requests with tools and ``default``
    for all others. ``named_tokens``: ``bos_token``, ``eos_token`` ... for the template. ``now``: the clock
    that ``strftime_now`` reads. Raises CheckpointError for a template that is no Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        named_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise CheckpointError("the chat template is an empty list")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["_bounded"] = _bounded
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {**(named_tokens or {}), **{k: v for k, v in tokens.items() if v is not None}}
        self._templates: dict[str, jinja2.Template] = {}
        variables: set[str] = {"tools"} if "tool_use" in sources else set()
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
                variables |= find_undeclared_variables(environment.parse(text))
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"the chat template {name!r}, line {error.lineno}: {error.message}"
                ) from error
            except RecursionError:
                raise CheckpointError(f"the chat template {name!r} is nested too deep") from None
        self.source = "\n".join(sources.values())
        """All of its text."""
        self.variables = frozenset(variables)
        """What it reads that it does not set: ``tools`` where it can put tools to the model."""

    @classmethod
    def from_gguf_metadata(
        cls, metadata: Mapping[str, Any], named_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The templates under ``tokenizer.chat_template``; None where there is none."""
        key = "tokenizer.chat_template"
        sources: dict[str, str] = {}
        for name, value in metadata.items():
            if name == key or name.startswith(key + "."):
                if not isinstance(value, str):
                    raise CheckpointError(f"{name} is a {type(value).__name__}, not a string")
                sources[name[len(key) + 1 :] or "default"] = value
        return cls(sources, named_tokens=named_tokens) if sources else None

    @classmethod
    def from_folder(cls, path: str | Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """chat_template.jinja and additional_chat_templates/, or else chat_template in tokenizer_config.json;
        None where there is none."""
        folder = Path(path)
        file = folder / "chat_template.jinja"
        sources: dict[str, str] = {}
        if file.exists():
            files = {"default": file}
            files |= {
                other.stem: other for other in sorted((folder / "additional_chat_templates").glob("*.jinja"))
            }
            for name, one in files.items():
                try:
                    sources[name] = read_regular(one).decode("utf-8")
                except UnicodeDecodeError as error:
                    raise CheckpointError(f"{one}: not UTF-8: {error}") from error
        else:
            config_file = folder / "tokenizer_config.json"
            value = read_json_object(config_file).get("chat_template")
            if isinstance(value, str):
                sources["default"] = value
            elif value is not None:
                sources = _named_sources(value, config_file)
        return cls(sources, named_tokens=named_tokens) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for ``messages``, special tokens by name: encode it without ``add_special_tokens``.

        ``tools``: function definitions in OpenAI's form. ``extra``: further variables for the template, such
        as ``documents`` or ``enable_thinking``. Raises TemplateError.
        """
        if taken := sorted(_RESERVED & extra.keys()):
            raise TemplateError(f"chat template variables: {taken[0]!r} is taken")
        variables = {
            "documents": None,
            **self._tokens,
            **extra,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: _Budget(),
        }
        try:
            return self._choose(bool(tools)).render(variables)
        except _Refusal as error:
            raise TemplateError(f"the model's chat template refuses the conversation: {error}") from error
        except SecurityError as error:
            raise TemplateError(f"the model's chat template was stopped: {error}") from error
        except RecursionError:
            raise TemplateError("the model's chat template was stopped: it calls itself too deep") from None
        except Exception as error:  # a template computes: any error of Python's may come of it
            raise TemplateError(f"the model's chat template fails on the conversation: {error}") from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise TemplateError(
                f"the model has no default chat template, only {', '.join(sorted(self._templates))}"
            )
        return self._templates["default"]


def _named_sources(value: Any, file: Path) -> dict[str, str]:
    try:
        sources = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        sources = {}
    if not sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise CheckpointError(f"{file}: chat_template is neither a string nor a list of {{name, template}}")
    return sources
