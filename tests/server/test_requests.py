"""Bodies: every field is checked, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenfold.limits import RANGES, check_params
from tenfold.server.errors import ApiError
from tenfold.server.requests import ApiRequest, parse_chat, parse_completion

VOCAB = 1000


def chat(**fields: Any) -> ApiRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), ("here",), VOCAB)


def completion(**fields: Any) -> ApiRequest:
    return parse_completion(json.dumps({"prompt": "Hi", **fields}).encode(), ("here",), VOCAB)


# Field, value, and what the message must say besides the field's name.
BAD_IN_BOTH = [
    ("temperature", -0.1, "from 1e-06 to 2 (or 0"),
    ("temperature", 2.1, "2.1"),
    ("temperature", "hot", '"hot"'),
    ("temperature", True, "true"),
    ("temperature", 1e-9, "from 1e-06"),
    ("temperature", 10**400, "from"),
    ("top_p", 0, "from 1e-09 to 1"),
    ("top_p", 1.5, "1.5"),
    ("top_k", -2, "from -1 to 1000"),
    ("top_k", 1.5, "an integer"),
    ("min_p", 1.01, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("seed", 1 << 64, "an integer from -9223372036854775808 to 18446744073709551615"),
    ("seed", "x", "an integer"),
    ("stop", 5, "a string or a list"),
    ("stop", ["a"] * 17, "16"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", [5], "stop[0]"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("max_tokens", 0, "from 1"),
    ("max_tokens", 1 << 31, "to 2147483647"),
    ("max_tokens", "many", "an integer"),
    ("logit_bias", [], "an object"),
    ("logit_bias", {"x": 1}, "token ids"),
    ("logit_bias", {"1000": 1}, "from 0 to 999"),
    ("ignore_eos", 1, "true or false"),
    ("stream", "yes", "true or false"),
    ("stream_options", {"include_usage": True}, "stream: true"),
    ("n", 0, "from 1 to 128"),
    ("n", 129, "from 1 to 128"),
    ("n", True, "an integer"),
    ("safety_identifier", 5, "a string"),
    ("prompt_cache_key", 5, "a string"),
    ("prompt_cache_retention", "24h", "the cache keeps"),
    ("user", 5, "a string"),
    ("model", 5, "a string"),
    ("store", True, "nothing is stored"),
    ("metadata", {str(i): "" for i in range(17)}, "up to 16"),
    ("service_tier", "flex", "one tier"),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("field", "value", "says"), BAD_IN_BOTH)
def test_a_bad_value_is_refused_with_field_value_and_range(
    parse: Any, field: str, value: Any, says: str
) -> None:
    """400, ``param`` is the field, and the message helps."""
    with pytest.raises(ApiError) as caught:
        parse(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("messages", None, "missing"),
        ("messages", [], "at least one"),
        ("messages", "Hi", "a list"),
        ("top_logprobs", 3, "logprobs: true"),
        ("logprobs", 3, "true or false"),
        ("tools", {}, "a list"),
        ("tools", [{}] * 129, "up to 128"),
        ("tool_choice", "required", "no tools"),
        ("tool_choice", "maybe", '"none", "auto", "required"'),
        ("parallel_tool_calls", 1, "true or false"),
        ("functions", [{"name": "f"}], "use tools"),
        ("function_call", {"name": "f"}, "use tool_choice"),
        ("reasoning_effort", 3, "a string"),
        ("chat_template_kwargs", [], "an object"),
        ("verbosity", "low", "no such setting"),
        ("prediction", {"type": "content"}, "drafts"),
        ("web_search_options", {}, "searches nothing"),
        ("audio", {"voice": "x"}, "only text"),
        ("modalities", ["audio"], "only text"),
    ],
)
def test_a_bad_chat_value_is_refused(field: str, value: Any, says: str) -> None:
    """What only chats have."""
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt", None, "missing"),
        ("prompt", [], "empty"),
        ("prompt", ["a"] * 129, "up to 128"),
        ("prompt", {"a": 1}, "a string or a list"),
        ("logprobs", 21, "from 0 to 20"),
        ("echo", 1, "true or false"),
        ("best_of", 2, "only best_of = n (1)"),
        ("suffix", "x", "not supported"),
    ],
)
def test_a_bad_completion_value_is_refused(field: str, value: Any, says: str) -> None:
    """What only completions have."""
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [5, 1000]}, "stop_token_ids[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "boss", "content": "b"}]},
            "messages[1].role",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": ["Hi"]}, "messages[0]"),
    ],
)
def test_a_fault_inside_a_value_is_located(fields: dict[str, Any], param: str) -> None:
    """``param`` is the path of the very thing that is wrong."""
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("parse", [chat, completion])
def test_an_unknown_field_is_named(parse: Any) -> None:
    """Nothing is silently ignored, not even a null."""
    for value in (1, None):
        with pytest.raises(ApiError) as caught:
            parse(temprature=value)
        assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")


def test_a_wrong_model_is_404_with_the_list() -> None:
    """The client sees which names there are."""
    with pytest.raises(ApiError) as caught:
        chat(model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "here" in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": 1e400}', b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_400(body: bytes) -> None:
    """Whatever the bytes are, the answer is an error object."""
    with pytest.raises(ApiError) as caught:
        parse_chat(body, ("here",), VOCAB)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


EDGES = sorted({edge for range in RANGES.values() for edge in (range.low, range.high)})
NUMBERS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-3, 3),
)
NAMES = sorted(RANGES.keys() - {"logit_bias"})


@given(
    st.dictionaries(st.sampled_from(NAMES), NUMBERS),
    st.dictionaries(st.integers(-5, VOCAB + 5).map(str), NUMBERS, max_size=2),
    st.lists(st.integers(-5, VOCAB + 5), max_size=2),
)
@example({"temperature": 1e-7}, {}, [])
@example({"top_p": 1e-12, "repetition_penalty": 1e-3}, {}, [])
@example({"max_tokens": 1 << 31}, {}, [])
def test_what_the_front_lets_through_the_engine_takes(
    numbers: dict[str, float], bias: dict[str, float], stops: list[int]
) -> None:
    """No parameter gets as far as the engine only to be refused there."""
    try:
        parsed = completion(**numbers, logit_bias=bias, stop_token_ids=stops)
    except ApiError as error:
        assert error.status == 400 and error.param is not None
        return
    check_params(parsed.params, VOCAB)


def test_all_good_values_arrive() -> None:
    """Each field ends up where the engine reads it."""
    parsed = chat(
        model="here",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"5": -100},
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[7],
        max_completion_tokens=9,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        user="me",
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
    )
    params = parsed.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert params.logit_bias == {5: -100}
    assert params.seed == (1 << 64) - 1
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (7,))
    assert (params.max_tokens, params.ignore_eos, params.logprobs) == (9, True, 4)
    assert (parsed.stream, parsed.include_usage) == (True, True)


def test_a_seed_is_drawn_when_there_is_none() -> None:
    """So that another worker can carry on; two requests do not share it."""
    seeds = {chat().params.seed for _ in range(10)}
    assert None not in seeds
    assert len(seeds) == 10


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize("depth", [100, 300, 900, 990, 5000, 100_000])
@pytest.mark.parametrize("field", ["prompt", "messages", "stop", "tools", "", "no JSON"])
def test_deep_nesting_is_refused_like_any_other_nonsense(parse: Any, depth: int, field: str) -> None:
    """However deep, wherever, and closed or not."""
    nested = "[" * depth + "]" * depth
    body = "[" * depth if field == "no JSON" else f'{{"{field}": {nested}}}' if field else nested
    with pytest.raises(ApiError) as caught:
        parse(body.encode(), ("here",), VOCAB)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


def test_null_is_the_same_as_absent_and_an_answer_can_be_sent_back() -> None:
    """Clients send nulls for what they do not set, and whole messages of ours."""
    message: Any = {
        "role": "assistant",
        "content": "Yes",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    parsed = chat(temperature=None, stop=None, tools=None, max_tokens=None, messages=[message])
    assert parsed.params.temperature == 1.0
    assert parsed.messages == [{"role": "assistant", "content": "Yes"}]


def test_text_parts_are_joined_and_prompts_may_be_ids() -> None:
    """Both forms of content, and both forms of a prompt."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == [
        {"role": "user", "content": "a\nb"}
    ]
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
    assert completion(prompt="x").prompts == completion(prompt=["x"]).prompts == ("x",)


@pytest.mark.parametrize(
    "prompt", [["a", 1], ["a", "b", [1]], [[1], "a"], [[1], 2], [1, "a"], [1, [2]], ["a", None]]
)
def test_a_prompt_of_different_things_is_not_taken_for_several(prompt: Any) -> None:
    """The first item that does not belong is named."""
    odd = next(i for i, item in enumerate(prompt) if type(item) is not type(prompt[0]))
    with pytest.raises(ApiError, match=rf"prompt\[{odd}\] is .* list of token ids|prompt\[{odd}\].*integer"):
        completion(prompt=prompt)


def test_max_tokens_and_its_new_name_must_agree() -> None:
    """Two different limits are a contradiction, the same one twice is not."""
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    with pytest.raises(ApiError, match="differ"):
        chat(max_tokens=5, max_completion_tokens=6)
