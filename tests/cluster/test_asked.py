"""A request of Dynamo's front, read: mapped wholly, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.cluster.asked import prompt_link, read_request
from tenfold.limits import RequestError
from tenfold.protocol import Constraint

NOTHING: dict[str, Any] = {
    "model": "m",
    "stop_conditions": {"max_tokens": None, "stop": None, "min_tokens": None, "ignore_eos": None},
    "sampling_options": {"n": None, "best_of": None, "temperature": None, "seed": None},
    "output_options": {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None},
    "eos_token_ids": [2],
    "routing": {"dp_rank": 0},
    "router_config_override": None,
}


def request(tokens: list[int], **groups: dict[str, Any]) -> dict[str, Any]:
    """As the front sends it, with the given fields of groups changed."""
    made = {**NOTHING, "token_ids": tokens}
    for name, fields in groups.items():
        made[name] = {**(made.get(name) or {}), **fields}
    return made


def test_all_that_says_how_to_sample() -> None:
    """Promise: each parameter arrives as itself; what the front calls off is off; lists of ends are one."""
    sampling = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -1, "n": 1}
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.25}
    stops = {"max_tokens": 7, "stop_token_ids_hidden": [2, 5], "stop_token_ids_visible": [6, 5]}
    asked = read_request(
        request(
            [1, 2, 3],
            sampling_options={**sampling, **penalties},
            stop_conditions=stops,
            output_options={"logprobs": 2},
            routing={"cache_salt": "tenant"},
        ),
        "id",
        "id~0",
    )
    params = asked.params
    assert (asked.id, asked.prompt, asked.output, asked.namespace) == ("id~0", (1, 2, 3), (), "tenant")
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 0, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.5,
        0.25,
        -0.25,
    )
    assert (params.seed, params.max_tokens, params.logprobs) == (2**64 - 1, 7, 2)
    assert params.stop_token_ids == (2, 5, 6) and asked.eos_token_ids == (2,) and not params.ignore_eos


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_a_request_on_its_way_from_worker_to_worker(
    prompt: list[int], received: list[list[int]], most: int | None, seed: int | None
) -> None:
    """Promise: however often it moves, and whatever was received between, it is the same request: the prompt
    ends where it did, the seed and the length it may have are the first worker's."""
    front = request(list(prompt), sampling_options={"seed": seed}, stop_conditions={"max_tokens": most})
    first = read_request(front, "id", "id~0")
    output: list[int] = []
    for tokens in received:
        front["migration_link"] = prompt_link(len(read_request(front, "id", "again").prompt))
        if most is not None:
            tokens = tokens[: most - len(output) - 1]

        # What the front does: it knows of the prompt's end no more than the link says.
        output += tokens
        front["token_ids"] = [*front["token_ids"], *tokens]
        if most is not None:
            front["stop_conditions"] = {**front["stop_conditions"], "max_tokens": most - len(output)}
        moved = read_request(front, "id", "id~1")
        assert (moved.prompt, moved.output) == (first.prompt, tuple(output))
        assert moved.params == first.params


def test_a_request_without_a_seed_has_one() -> None:
    """Promise: it is the same on all workers, and another for another request."""
    one = read_request(request([1]), "a", "a~0").params.seed
    assert one == read_request(request([1]), "a", "a~7").params.seed
    assert one is not None and one != read_request(request([1]), "b", "b~0").params.seed


def test_a_link_that_is_a_tracers() -> None:
    """Promise: nobody knows then where the prompt ends; what depends on that is refused."""
    link = {"trace_id": "1" * 32, "span_id": "2" * 16}
    assert read_request({**request([1, 2]), "migration_link": link}, "a", "a").prompt == (1, 2)
    penalty = request([1, 2], sampling_options={"frequency_penalty": 0.5})
    with pytest.raises(RequestError, match="frequency_penalty"):
        read_request({**penalty, "migration_link": link}, "a", "a")


@pytest.mark.parametrize(
    "groups",
    [
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"best_of": 2}},
        {"sampling_options": {"use_beam_search": True}},
        {"sampling_options": {"length_penalty": 0.5}},
        {"sampling_options": {"include_stop_str_in_output": True}},
        {"sampling_options": {"guided_decoding": {"whitespace_pattern": "x"}}},
        {"stop_conditions": {"min_tokens": 2}},
        {"stop_conditions": {"max_thinking_tokens": 2}},
        {"output_options": {"prompt_logprobs": 1}},
        {"multi_modal_data": {"image_url": []}},
    ],
)
def test_what_the_engine_does_not_have(groups: dict[str, dict[str, Any]]) -> None:
    """Promise: it is refused, by the name of the field."""
    (fields,) = groups.values()
    names = [*groups, *fields, "guided_whitespace_pattern"]
    with pytest.raises(RequestError) as error:
        read_request(request([1], **groups), "a", "a")
    assert error.value.field in names


@pytest.mark.parametrize(
    ("guided", "constraint"),
    [
        ({"json": {"type": "object"}}, Constraint(kind="json_object", field="response_format")),
        (
            {"json": {"type": "array"}},
            Constraint(kind="json_schema", text='{"type": "array"}', field="guided_json"),
        ),
        ({"json": '{"a": 1}'}, Constraint(kind="json_schema", text='{"a": 1}', field="guided_json")),
        ({"regex": "a+", "backend": "x"}, Constraint(kind="regex", text="a+", field="guided_regex")),
        ({"choice": ["a"]}, Constraint(kind="choice", text='["a"]', field="guided_choice")),
        ({"grammar": "root"}, Constraint(kind="grammar", text="root", field="guided_grammar")),
        ({"json": None, "choice": []}, None),
    ],
)
def test_constraints(guided: dict[str, Any], constraint: Constraint | None) -> None:
    """Promise: each kind of constraint is the engine's own of that kind; two at once are refused."""
    asked = read_request(request([1], sampling_options={"guided_decoding": guided}), "a", "a")
    assert asked.params.constraint == constraint
    with pytest.raises(RequestError, match="guided_choice and guided_regex"):
        both = {"regex": "a", "choice": ["b"]}
        read_request(request([1], sampling_options={"guided_decoding": both}), "a", "a")


def test_a_token_that_is_none() -> None:
    """Promise: bytes without a token leave no token behind."""
    assert read_request(request([1, 9, 2]), "a", "a", hole=9).prompt == (1, 2)
