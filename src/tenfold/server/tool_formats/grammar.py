"""Calls as a grammar: what makes a model call a tool, and keeps its arguments to their schemas.

The text is Lark in llguidance's dialect: ``%json`` is a JSON schema, ``<[7]>`` the token 7, which is how a
marker that is a control token must be written, for no text ever becomes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tenfold.server.reasoning import ReasoningFormat
from tenfold.server.tool_formats.base import ToolFormat

MAX_CALLS = 32
"""Of one constrained answer; else a small model might never end."""
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON; bounded, for a small model can go on with it for ever."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is to be."""

    schemas: Mapping[str, dict[str, Any]] = {}
    """Of the arguments, for each tool that may be called."""
    forced: bool = False
    """Calls and nothing else."""
    one_call: bool = False
    text_schema: str | None = None
    """The JSON schema of an answer that is no call; None: any text that no call is in. Only where calls are
    not forced."""
    reasoning: ReasoningFormat | None = None
    """The answer may begin with it."""
    opened: bool = False
    """The answer begins within it."""


def answer_grammar(form: ToolFormat | None, wanted: Wanted, special: Mapping[str, int]) -> str:
    """The grammar of an answer. ``form``: of its calls; None: there are none, and its text has a schema.
    ``special``: the model's control tokens by name."""
    thought, rules = _thought(wanted, special)
    answer = ["answer: text"] if form is None else _Calls(form, wanted, special).rules()
    if wanted.text_schema is not None:
        rules.append(f"text: %json {_schema(json.loads(wanted.text_schema))}")
    return "\n".join((f"start: {thought}answer", *answer, *rules, ""))


class _Section(msgspec.Struct, frozen=True):
    """A stretch of calls: its beginning, an expression for what comes then, and what may part two of them."""

    mark: str
    after: str
    """Text that belongs to the beginning."""
    body: str
    between: str
    many: bool
    """One call a section; else one section for all."""


class _Calls:
    def __init__(self, form: ToolFormat, wanted: Wanted, special: Mapping[str, int]) -> None:
        self._form = form
        self._wanted = wanted
        self._special = special

    def rules(self) -> list[str]:
        """All rules, that of the answer first."""
        wanted, section = self._wanted, self._section()
        most = MAX_CALLS if section.many and not wanted.one_call else 1
        begin = self._mark(section.mark, after=section.after) if section.mark else ""
        rules = [f"section: {begin} {section.body}", *self._call_rules()]
        parted = f"{_quoted(section.between)} section" if section.between else "section"
        calls = f"section ({parted}){{0,{most - 1}}}" if most > 1 else "section"
        if wanted.forced:
            rules.insert(0, f"answer: {calls}")
        elif wanted.text_schema is not None:
            rules.insert(0, f"answer: {calls} | text")
        elif not section.mark:  # calls come first or not at all
            rules[:0] = [f"answer: {calls} | PLAIN", self._text_rule()]
            rules.append(r"PLAIN: TEXT & /(?s:\s*([^\s{].*)?)/")
        elif section.mark in self._special:
            rules[:0] = [f"answer: TEXT (section TEXT){{0,{most}}}", self._text_rule()]
        else:
            # Text and the beginning must be one terminal: a lexer that has read on into it cannot turn back.
            rules[0] = f"section: BEGIN {section.body}"
            rules[:0] = [f"answer: section{{0,{most}}} TEXT", self._text_rule(), f"BEGIN: TEXT {begin}"]
        return rules

    def _section(self) -> _Section:
        form = self._form
        if form.name == "hermes":
            end = self._mark("</tool_call>", before="\n")
            return _Section("<tool_call>", "\n", f"call {end}", "\n", True)
        if form.name == "smollm2":
            end = self._mark("</tool_call>", before="]")
            return _Section("<tool_call>", "[", f"{self._list(', ')} {end}", "", False)
        if form.name == "llama3":
            return _Section("", "", self._list("; "), "", False)
        if self._headed:
            return _Section("[TOOL_CALLS]", "", "call", "", True)
        return _Section("[TOOL_CALLS]", "[", f'{self._list(", ")} "]"', "", False)

    @property
    def _headed(self) -> bool:
        """Names stand before their arguments: the model has a token for that."""
        return self._form.header and "[ARGS]" in self._special

    def _call_rules(self) -> list[str]:
        schemas = self._wanted.schemas
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
        key = "parameters" if self._form.name == "llama3" else "arguments"
        for i, (name, schema) in enumerate(schemas.items()):
            if self._headed:
                rules.append(f"call_{i}: {_quoted(name)} {self._mark('[ARGS]')} arguments_{i}")
            else:
                head = f'{{"name": {json.dumps(name)}, {json.dumps(key)}: '
                rules.append(f'call_{i}: {_quoted(head)} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {_schema(schema)}")
        return rules

    def _list(self, between: str) -> str:
        more = "" if self._wanted.one_call else f" ({_quoted(between)} call){{0,{MAX_CALLS - 1}}}"
        return f"call{more}"

    def _mark(self, name: str, before: str = "", after: str = "") -> str:
        """A marker, with text that belongs to it."""
        return _mark(name, self._special, before, after)

    def _text_rule(self) -> str:
        """Text in which no marker is: control tokens are in no text anyway."""
        marks = [mark for mark in self._form.markers if mark not in self._special]
        return "TEXT: /(?s:.*)/" + "".join(f" & ~/(?s:.*){_literal(mark)}(?s:.*)/" for mark in marks)


def _thought(wanted: Wanted, special: Mapping[str, int]) -> tuple[str, list[str]]:
    """What reasoning may or must come first, as the beginning of an expression, and its rules."""
    reasoning = wanted.reasoning
    if reasoning is None:
        return "", []
    if reasoning.end in special:
        rules = [f"thought: THOUGHT {_mark(reasoning.end, special)} GAP", "THOUGHT: /(?s:.*)/"]
    else:
        rules = ["thought: thinking GAP", f"thinking[suffix={_quoted(reasoning.end)}]: /(?s:.*)/"]
    rules.append(r"GAP: /\n{0,4}/")
    return ("thought " if wanted.opened else f"({_mark(reasoning.start, special)} thought)? "), rules


def _mark(name: str, special: Mapping[str, int], before: str = "", after: str = "") -> str:
    if name not in special:
        return _quoted(before + name + after)
    parts = (_quoted(before) if before else "", f"<[{special[name]}]>", _quoted(after) if after else "")
    return " ".join(part for part in parts if part)


def _schema(schema: dict[str, Any]) -> str:
    options = {"lenient": False, "whitespace_pattern": _WHITE_SPACE}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
