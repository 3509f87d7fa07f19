"""Dividing traffic."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.traffic.reading import TrafficRequest
from tenfold.traffic.splits import before_newest, newest, split, untrained, write_trained
from tests.helpers.traffic import traffic_request

traffic = st.lists(
    st.tuples(st.integers(0, 25), st.integers(0, 2), st.integers(0, 1000)), min_size=1, max_size=80
).map(
    lambda rows: sorted(
        (
            traffic_request(i, conversation=f"c{talk}", kind="abc"[kind], time=float(time))
            for i, (talk, kind, time) in enumerate(rows)
        ),
        key=lambda one: one.time,
    )
)


def last_times(part: list[TrafficRequest]) -> dict[str, float]:
    return {one.conversation: one.time for one in part}


@given(traffic)
def test_parts_share_no_conversation_and_the_newest_are_held_out(requests: list[TrafficRequest]) -> None:
    """Nothing is lost or doubled; within a class every held-out conversation ended after all that were
    trained on."""
    try:
        parts = split(requests)
    except ValueError as error:
        assert "too few conversations" in str(error)
        return
    assert sorted(one.line for part in parts for one in part) == sorted(one.line for one in requests)
    talks = [{one.conversation for one in part} for part in parts]
    assert not (talks[0] & talks[1] or talks[0] & talks[2] or talks[1] & talks[2])
    kinds: dict[str, str] = {}
    for one in requests:
        kinds.setdefault(one.conversation, one.kind)
    times = [last_times(part) for part in parts]
    for older, newer in ((0, 1), (1, 2), (0, 2)):
        for talk, time in times[older].items():
            assert all(time <= other for name, other in times[newer].items() if kinds[name] == kinds[talk])


@pytest.mark.parametrize(("count", "sizes"), [(3, (1, 1, 1)), (20, (15, 2, 3)), (100, (75, 10, 15))])
def test_shares_are_those_asked_for(count: int, sizes: tuple[int, ...]) -> None:
    """15 % and 10 % of the conversations, and at least one."""
    assert tuple(map(len, split([traffic_request(i) for i in range(count)]))) == sizes


def test_what_is_replayed_is_what_is_held_out() -> None:
    """The same file gives the same newest part to both commands."""
    requests = [traffic_request(i, kind="ab"[i % 2]) for i in range(41)]
    assert newest(requests) == split(requests).held_out
    assert newest(requests, 1) == requests


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_conversations_are_an_error(count: int) -> None:
    """With what to do about it."""
    with pytest.raises(ValueError, match="at least 3"):
        split([traffic_request(i) for i in range(count)])


def test_a_drafter_is_not_judged_by_what_it_has_learnt_from(tmp_path: Path) -> None:
    """Whatever file the conversations come in again; and their names are not in the drafter's folder."""
    requests = [traffic_request(i, conversation=f"secret {i // 2}") for i in range(10)]
    write_trained(tmp_path, requests[:5])
    assert untrained(tmp_path, requests) == requests[6:]
    assert b"secret" not in (tmp_path / "trained.json").read_bytes()
    (tmp_path / "trained.json").write_text("[1")
    with pytest.raises(ValueError, match=r"trained\.json"):
        untrained(tmp_path, requests)


@given(traffic, st.floats(0.01, 1), st.integers(1, 8))
def test_what_is_surveyed_is_next_older_than_what_is_replayed(
    requests: list[TrafficRequest], share: float, most: int
) -> None:
    """No conversation is in both, none that is left out is newer, and no class has too many."""
    replayed, surveyed = newest(requests, share), before_newest(requests, share, most)
    assert not last_times(replayed).keys() & last_times(surveyed).keys()
    for kind in "abc":
        assert sum(one.kind == kind for one in surveyed) <= most
    assert before_newest(requests, 1, most) == []
    talks = [traffic_request(i, conversation=f"c{i}", time=float(i)) for i in range(20)]
    assert [one.line for one in before_newest(talks, 0.2, 3)] == [13, 14, 15]
