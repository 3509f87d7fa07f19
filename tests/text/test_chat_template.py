from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.chat_template import ChatTemplate, TemplateError

from . import templates

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a town: <b>now</b> & later, in °C",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["town"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abc123def",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"town": "Łódź"}},
        }
    ],
}
USER = {"role": "user", "content": "  Hi <there> & 你好 \n"}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": '<think>\nhm\n</think>\n\nHello "you"'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Bye"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
    "tool": [USER, CALL, {"role": "tool", "content": '{"t": 3}', "tool_call_id": "abc123def"}],
    "alternation": [USER, USER],
}
SOURCES = {
    "llama3": templates.LLAMA3,
    "qwen": templates.QWEN,
    "mistral": templates.MISTRAL,
    "gemma": templates.GEMMA,
    "rag": templates.RAG,
}


def like_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str | Exception:
    """The peer's own rendering, or what it raises."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return error
    return text


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts_are_those_of_transformers(name: str, conversation: str) -> None:
    """The model sees what it was trained on, character for character; what transformers refuses is
    refused."""
    template = ChatTemplate(SOURCES[name], "<s>", "</s>")
    messages = CONVERSATIONS[conversation]
    variants: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [TOOL]},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 2026"},
        {"add_generation_prompt": True, "documents": [{"title": "a", "text": "b"}]},
    ]
    for options in variants:
        expected = like_transformers(SOURCES[name], messages, **options)
        if isinstance(expected, str):
            assert template.render(messages, **options) == expected
        else:
            with pytest.raises(TemplateError) as caught:
                template.render(messages, **options)
            assert str(expected) in str(caught.value)


def test_smollm2_s_template_from_its_file(smollm2_metadata: dict[str, Any]) -> None:
    """A GGUF file's template is found and gives the prompt that its model was trained on."""
    template = ChatTemplate.from_gguf_metadata(smollm2_metadata, {})
    assert template is not None
    expected = like_transformers(
        smollm2_metadata["tokenizer.chat_template"], [USER, ANSWER, USER], add_generation_prompt=True
    )
    assert template.render([USER, ANSWER, USER]) == expected


def test_the_clock_is_the_caller_s() -> None:
    """A prompt with a date is a function of the request and of a clock that can be held still."""
    template = ChatTemplate('{{ strftime_now("%Y-%m-%d") }}', now=lambda: datetime(2026, 5, 1))
    assert template.render([]) == "2026-05-01"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Only user messages!') }}", "refuses the conversation: Only user messages!"),
        ("{{ messages[0].content.foo.bar }}", "foo"),
        ("{{ messages[7].content }}", "fails on the conversation"),
        ("{{ 'a' + 1 }}", "fails on the conversation"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for a in range(1000000000) %}{% endfor %}", "too big"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        (
            "{% for a in range(99999) %}{% for b in range(99999)|map('abs') %}{% endfor %}{% endfor %}",
            "steps",
        ),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deep"),
        ("{{ 'a' * 1000000000 }}", "repeats"),
        ("{{ 1000000000 * [1] }}", "repeats"),
        ("{{ 10 ** 10 ** 10 }}", r"\*\*"),
    ],
)
def test_a_template_that_fails_or_runs_away_says_why(source: str, said: str) -> None:
    """Whatever a template does, the client gets one kind of error, soon, with the reason in it. (In time of
    the processor: on a busy machine nothing is soon.)"""
    template = ChatTemplate(source)
    start = time.process_time()
    with pytest.raises(TemplateError, match=said):
        template.render([USER])
    assert time.process_time() - start < 20


def test_a_loop_costs_its_own_rounds_only() -> None:
    """Long conversations, and several loops over them, are no runaway; loop variables keep their meaning."""
    template = ChatTemplate(
        "{% for m in messages %}{{ loop.last }}{% endfor %}"
        "{% for m in messages|selectattr('role') if m.content %}{{ loop.length }}{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{{ loop.nextitem }}{% endfor %}"
        "{% for m in nothing %}{% else %}none{% endfor %}"
    )
    text = template.render([USER] * 20_000)
    assert text.count("False") == 19_999
    assert text.count("20000") == 20_000
    assert text.endswith("role('content', '  Hi <there> & 你好 \\n')contentnone")


def test_variables_of_a_request_cannot_replace_the_engine_s() -> None:
    """A client's template variables reach the template, but not under the names that rendering relies on."""
    template = ChatTemplate("{{ bos_token }}{{ mood }}", "<s>")
    assert template.render([], mood="fine") == "<s>fine"
    for name in ("raise_exception", "strftime_now", "_tenfold_budget"):
        with pytest.raises(TemplateError, match=name):
            template.render([], **{name: 1})  # type: ignore[arg-type]


def test_templates_in_a_folder(tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json, where it may be text or a list of named ones."""
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one {{ bos_token }}"}')
    template = ChatTemplate.from_folder(tmp_path, {"bos_token": "<s>"})
    assert template is not None
    assert template.render([]) == "one <s>"

    config.write_text(
        '{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}'
    )
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template is not None
    assert (template.render([]), template.render([], tools=[TOOL])) == ("d", "t")

    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template is not None
    assert template.render([]) == "file"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"chat_template": "{% for %}"}', "line 1"),
        ('{"chat_template": 3}', "tokenizer_config.json"),
        ('{"chat_template": []}', "tokenizer_config.json"),
        ('{"chat_template": [{"name": "default"}]}', "tokenizer_config.json"),
        ('{"chat_template": "', "not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_broken_template_is_an_error_of_the_checkpoint(tmp_path: Path, config: str, said: str) -> None:
    """A model whose template cannot be used says so when it is opened, not at the first request."""
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        ChatTemplate.from_folder(tmp_path, {})


def test_named_templates_in_gguf_metadata() -> None:
    """``tokenizer.chat_template.NAME`` are the named templates; one that is no text is refused."""
    metadata: dict[str, Any] = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    template = ChatTemplate.from_gguf_metadata(metadata, {})
    assert template is not None
    assert (template.render([]), template.render([], tools=[TOOL])) == ("d", "t")
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template is a int"):
        ChatTemplate.from_gguf_metadata({"tokenizer.chat_template": 3}, {})
    assert ChatTemplate.from_gguf_metadata({}, {}) is None
