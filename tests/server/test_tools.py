"""Tools in a request: its fields, its messages, what the template is given, what constrains the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenfold.checkpoint.chat_template import ChatTemplate
from tenfold.config import REASONING_FORMATS, TOOL_FORMATS
from tenfold.constraints.compiler import Compiler
from tenfold.protocol import Constraint
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import choose_chat
from tenfold.server.errors import ApiError
from tenfold.server.fields import Fields
from tenfold.server.messages import parse_messages
from tenfold.server.reasoning import FORMATS as REASONING
from tenfold.server.reasoning import THINK
from tenfold.server.text import Text
from tenfold.server.tool_constraint import chat_constraint
from tenfold.server.tool_formats.choose import FORMATS, choose_tools, write_out
from tenfold.server.tool_formats.grammar import Wanted, answer_grammar
from tenfold.server.tools import ToolUse, parse_tools
from tests.helpers.fake_text import FakeStream, FakeTokenizer
from tests.text.templates import GEMMA, LLAMA3, MISTRAL, QWEN

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}


def taken(**fields: Any) -> ToolUse | None:
    known = Fields(fields)
    use = parse_tools(known)
    known.finish()
    return use


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}, "x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "y": 1}}]}, "tools[0].function.y"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [TIME, WEATHER, TIME]}, "tools[2].function.name"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": {"type": "tool", "function": {"name": "time"}}},
            "tool_choice.type",
        ),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "space"}}},
            "tool_choice.function.name",
        ),
    ],
)
def test_a_wrong_tool_is_located(fields: Any, param: str) -> None:
    """400 that names the very field."""
    with pytest.raises(ApiError) as caught:
        taken(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rpartition(".")[2] in caught.value.message


def test_good_tools_are_as_templates_want_them() -> None:
    """With a description and parameters, whether the client gave them or not, and nothing else."""
    use = taken(tools=[TIME, WEATHER], tool_choice="auto", parallel_tool_calls=False)
    assert use is not None
    empty = {"type": "object", "properties": {}}
    assert use.tools == [
        {"type": "function", "function": {"name": "time", "description": "", "parameters": empty}},
        WEATHER,
    ]
    assert (use.choice, use.parallel) == ("auto", False)
    assert use.names == {"time", "weather"}
    named = taken(tools=[TIME, WEATHER], tool_choice={"type": "function", "function": {"name": "time"}})
    assert named is not None
    assert (named.choice, named.named, named.parallel) == ("required", "time", False)
    assert taken(tools=[], tool_choice="auto") is None
    assert taken(tools=None, tool_choice=None) is None


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def test_messages_of_a_conversation_with_tools() -> None:
    """Arguments become objects, which templates expect; a tool's answer learns its tool's name."""
    messages = parse_messages(TALK)
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
        ],
    }
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    (again,) = parse_messages([{"role": "assistant", "content": "x", "tool_calls": [broken]}])
    assert again["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": 5}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "z": 1}]}, "messages[0].tool_calls[0].z"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "c1"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages[0].reasoning_content"),
    ],
)
def test_a_wrong_message_is_located(message: Any, param: str) -> None:
    """400 that names the very field."""
    with pytest.raises(ApiError) as caught:
        parse_messages([message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_tool_answers_a_call_that_was_made() -> None:
    """Before it, and by the call's id: as in the other APIs."""
    call: Any = {"role": "assistant", "tool_calls": [CALL]}
    answer: Any = {"role": "tool", "content": "rain", "tool_call_id": CALL["id"]}
    assert parse_messages([call, answer, answer])[2]["name"] == call["tool_calls"][0]["function"]["name"]
    for messages in ([answer, call], [call, answer, {**answer, "tool_call_id": "other"}]):
        with pytest.raises(ApiError, match="no call in tool_calls before it has that id"):
            parse_messages(messages)


def text_of(template: str | None, special: dict[str, int] | None = None) -> Text:
    chat = None if template is None else ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    return Text(FakeTokenizer(), chat, FakeStream, special_tokens=special or {})


@pytest.mark.parametrize(
    ("template", "asked", "form", "native"),
    [
        (QWEN, "auto", "hermes", True),
        (LLAMA3, "auto", "llama3", True),
        (MISTRAL, "auto", "mistral", True),
        (GEMMA, "auto", "hermes", False),
        ("You are SmolLM{{ messages[0].content }}", "auto", "smollm2", False),
        (QWEN, "llama3", "llama3", True),
        (GEMMA, "mistral", None, True),
        (GEMMA, "none", None, True),
        (None, "auto", None, True),
    ],
)
def test_the_format_is_that_of_the_template(
    template: str | None, asked: str, form: str | None, native: bool
) -> None:
    """Or as asked for; and where tools cannot be had, the reason is at hand."""
    setup = choose_tools(text_of(template), asked)
    assert (setup.form.name if setup.form else None, setup.native) == (form, native)
    assert setup.why


def test_the_choices_on_the_command_line_are_those_that_there_are() -> None:
    """`config` names them without importing them."""
    assert set(TOOL_FORMATS) == {"auto", "none", *FORMATS}
    assert set(REASONING_FORMATS) == {"auto", "none", *REASONING}


def test_reasoning_is_found_in_the_template() -> None:
    """And can be chosen, or switched off; the plan says why it is as it is."""
    think = text_of("{{ messages[0].content.split('</think>')[-1] }}")
    assert choose_chat(think).reasoning is THINK
    assert choose_chat(think, reasoning_format="none").reasoning is None
    assert choose_chat(text_of(GEMMA)).reasoning is None
    assert choose_chat(text_of(GEMMA), reasoning_format="think").reasoning is THINK
    assert [line.name for line in choose_chat(think).lines()] == ["tool calls", "reasoning"]
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("form", ["hermes", "smollm2"])
def test_tools_are_written_out_for_a_template_that_knows_none(form: str) -> None:
    """In the system message, as the model's own text, and as a message of the user's: alternation stays."""
    messages = parse_messages([{"role": "system", "content": "Be brief."}, *TALK, TALK[2]])
    written = write_out(messages, [WEATHER], FORMATS[form])
    assert [message["role"] for message in written] == ["system", "user", "assistant", "user"]
    assert written[0]["content"].startswith("Be brief.\n\n")
    assert '"weather"' in written[0]["content"] and "<tools>" in written[0]["content"]
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in written[2]["content"]
    assert written[2]["content"].startswith("<tool_call>")
    assert written[3]["content"].count("<tool_response>") == 2
    assert all(set(message) == {"role", "content"} for message in written)
    assert write_out(messages[1:2], [WEATHER], FORMATS[form])[0]["role"] == "system"


@pytest.mark.parametrize("form", FORMATS)
def test_the_grammar_of_a_forced_call(form: str) -> None:
    """Its text: the format's markers around each tool's schema."""
    wanted = Wanted(schemas={"weather": PARAMETERS, "time": {"type": "object"}}, forced=True)
    text = answer_grammar(FORMATS[form], wanted, {})
    key = "parameters" if form == "llama3" else "arguments"
    lines = text.splitlines()
    assert lines[0] == "start: answer"
    assert f'call_0: "{{\\"name\\": \\"weather\\", \\"{key}\\": " arguments_0 "}}"' in lines
    assert "call: call_0 | call_1" in lines
    (schema,) = [line.removeprefix("arguments_0: %json ") for line in lines if line.startswith("arguments_0")]
    assert {**json.loads(schema), "x-guidance": 0} == {**PARAMETERS, "x-guidance": 0}
    begins = {
        "hermes": 'section: "<tool_call>\\n" call "\\n</tool_call>"',
        "smollm2": 'section: "<tool_call>[" call (", " call){0,31} "]</tool_call>"',
        "mistral": 'section: "[TOOL_CALLS][" call (", " call){0,31} "]"',
        "llama3": 'section: call ("; " call){0,31}',
    }
    assert begins[form] in [" ".join(line.split()) for line in lines]


VOCABULARY = FakeTokenizer()
"""One printable character a token."""
COMPILER = Compiler(lambda: VOCABULARY, 128)


def fits(constraint: Constraint, text: str) -> tuple[int, bool]:
    """How many characters may be written, and whether the answer may end there."""
    import numpy as np

    matcher = COMPILER.begin(constraint)
    ids = VOCABULARY.encode(text, add_special_tokens=False, parse_special=False)
    count = matcher.fitting(ids)
    for id in ids[:count]:
        matcher.accept(id)
    mask = np.zeros(4, np.uint32)
    matcher.fill(mask)
    return count, any(mask[end // 32] >> (end % 32) & 1 for end in matcher.ends)


def use(**fields: Any) -> ToolUse:
    found = taken(tools=[WEATHER, TIME], **fields)
    assert found is not None
    return found


GOOD = {
    "smollm2": '<tool_call>[{"name": "weather", "arguments": {"city": "x"}}]</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "x"}}]',
}


@pytest.mark.parametrize("form", GOOD)
def test_a_forced_call_can_be_nothing_else(form: str) -> None:
    """Required: a call of any tool, with arguments after its schema. Named: of that one, once."""
    sections = Sections(tools=FORMATS[form])
    required = chat_constraint(None, use(tool_choice="required"), sections, {})
    assert required is not None and required.field == "tool_choice"
    good = GOOD[form]
    assert fits(required, good) == (len(good), True)
    wrong = good.replace('"city": "x"', '"city": 5')
    assert fits(required, wrong)[0] == wrong.index("5")
    assert fits(required, good.replace("weather", "time").replace('"city": "x"', ""))[1]
    assert fits(required, "Hello") == (0, False)
    named = {"type": "function", "function": {"name": "time"}}
    only = chat_constraint(None, use(tool_choice=named), Sections(tools=FORMATS[form], one_call=True), {})
    assert only is not None
    assert fits(only, good)[0] < len(good) and not fits(only, good)[1]


@pytest.mark.parametrize("form", GOOD)
def test_a_strict_tool_is_free_until_it_is_called(form: str) -> None:
    """Any text, or calls of which the strict tool's follow its schema."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    tools = taken(tools=[strict, TIME])
    found = chat_constraint(None, tools, Sections(tools=FORMATS[form]), {})
    assert found is not None
    good = GOOD[form]
    assert fits(found, "Hello <tool") == (11, True)
    assert fits(found, good) == (len(good), True)
    wrong = good.replace('"city": "x"', '"city": 5')
    assert fits(found, wrong)[0] == wrong.index("5")
    assert fits(found, good.replace("weather", "time").replace("city", "zone"))[1]


def test_text_with_a_schema_may_be_a_call_instead() -> None:
    """With tools, response_format is for the answer that is none; other constraints are refused by name."""
    schema = Constraint(
        kind="json_schema", text='{"type": "null"}', field="response_format.json_schema.schema"
    )
    found = chat_constraint(schema, use(), Sections(tools=FORMATS["smollm2"]), {})
    assert found is not None
    assert fits(found, "null") == (4, True)
    assert fits(found, GOOD["smollm2"])[1]
    assert fits(found, "no")[0] == 1
    anything = chat_constraint(
        Constraint(kind="json_schema", text="true", field="guided_json"),
        *(use(), Sections(tools=FORMATS["smollm2"]), {}),
    )
    assert anything is not None and fits(anything, "[1]") == (3, True)
    for constraint, form in (
        (Constraint(kind="regex", text="a", field="regex"), "smollm2"),
        (schema, "llama3"),
    ):
        with pytest.raises(ApiError) as caught:
            chat_constraint(constraint, use(), Sections(tools=FORMATS[form]), {})
        assert (caught.value.param, caught.value.code) == (constraint.field, "unsupported_value")
    assert chat_constraint(schema, None, Sections(), {}) is schema
    assert chat_constraint(None, use(), Sections(tools=FORMATS["hermes"]), {}) is None


def test_reasoning_may_come_before_what_is_constrained() -> None:
    """Where the prompt opens it, it must be closed first; a marker that is a token is one in the grammar."""
    schema = Constraint(kind="json_schema", text='{"type": "null"}', field="response_format")
    opened = chat_constraint(schema, None, Sections(reasoning=THINK, opened=True), {})
    assert opened is not None
    assert fits(opened, "hm</think>null") == (14, True)
    assert not fits(opened, "null")[1]
    forced = use(tool_choice="required")
    either = chat_constraint(None, forced, Sections(tools=FORMATS["smollm2"], reasoning=THINK), {})
    assert either is not None
    assert fits(either, "<think>hm</think>" + GOOD["smollm2"])[1]
    assert fits(either, GOOD["smollm2"])[1]
    special = {"[TOOL_CALLS]": 100, "[ARGS]": 101, "</think>": 102}
    wanted = Wanted(schemas={"f": PARAMETERS}, forced=True, reasoning=THINK, opened=True)
    lines = answer_grammar(FORMATS["mistral"], wanted, special).splitlines()
    assert 'call_0: "f" <[101]> arguments_0' in lines
    assert "thought: THOUGHT <[102]> GAP" in lines
    assert "section: <[100]> call" in lines


def test_a_schema_that_cannot_be_enforced_is_located() -> None:
    """Where calls are forced or a tool is strict; else schemas are the template's affair."""
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "if": {}}}}
    tools = taken(tools=[TIME, odd], tool_choice="required")
    with pytest.raises(ApiError) as caught:
        chat_constraint(None, tools, Sections(tools=FORMATS["hermes"]), {})
    assert caught.value.param == "tools[1].function.parameters.if"
    assert chat_constraint(None, taken(tools=[TIME, odd]), Sections(tools=FORMATS["hermes"]), {}) is None
