"""The store of answers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.traffic.store import ANSWERS, FEATURES, AnswerStore, Features, Identity

IDENTITY = Identity(model="m", format="q4", kv_format="bf16", taps=("a", "b"), width=3)


def rows(count: int, start: int = 0) -> Features:
    return np.arange(start, start + 3 * count, dtype=np.uint16).reshape(count, 3)


def fill(folder: Path, count: int) -> None:
    with AnswerStore(folder, IDENTITY) as store:
        for i in range(count):
            store.add(f"k{i}", tuple(range(i, i + 4)), "length", rows(i % 4, 100 * i))


def check(store: AnswerStore, count: int) -> None:
    """The first ``count`` answers are there, each with its own features."""
    assert list(store.answers) == [f"k{i}" for i in range(count)]
    features = store.features()
    for i, answer in enumerate(store.answers.values()):
        assert answer.tokens == tuple(range(i, i + 4))
        own = features[answer.first_row : answer.first_row + answer.rows]
        assert np.array_equal(own, rows(i % 4, 100 * i))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_cut_off_or_spoilt_all_before_it_is_kept(data: st.DataObject) -> None:
    """A crash may leave any prefix of either file, and a disk may lose what was not flushed: what is read
    again is a whole prefix of the answers, and it can be added to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, 8)
        path = folder / data.draw(st.sampled_from((ANSWERS, FEATURES)))
        content = bytearray(path.read_bytes())
        head = content.index(b"\n") + 1 if path.name == ANSWERS else 0
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[at:]
        elif at >= head:
            content[at] ^= 1 + data.draw(st.integers(0, 254))
        path.write_bytes(content)
        with AnswerStore(folder, IDENTITY) as store:
            kept = len(store.answers)
            check(store, kept)
        with AnswerStore(folder, IDENTITY) as store:
            for i in range(kept, 8):
                store.add(f"k{i}", tuple(range(i, i + 4)), "length", rows(i % 4, 100 * i))
            check(store, 8)
        with AnswerStore(folder, IDENTITY) as store:
            check(store, 8)


def test_features_stay_when_the_store_is_closed(tmp_path: Path) -> None:
    """Training maps them long after answering is over."""
    fill(tmp_path, 4)
    with AnswerStore(tmp_path, IDENTITY) as store:
        features = store.features()
    assert np.array_equal(features[:1], rows(1, 100))


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"format": "q8"},
        {"taps": ("a",)},
        {"width": 4},
        {"version": 2},
    ],
)
def test_answers_of_another_model_are_not_mixed_in(other: dict[str, object], tmp_path: Path) -> None:
    """The error names what differs."""
    fill(tmp_path, 2)
    with pytest.raises(ValueError, match=next(iter(other))):
        AnswerStore(tmp_path, msgspec.structs.replace(IDENTITY, **other))
    with AnswerStore(tmp_path, IDENTITY) as store:
        check(store, 2)


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    """A folder that is something else's is refused, with all that is in it left as it was."""
    (tmp_path / ANSWERS).write_text("my own notes\nof years\n")
    with pytest.raises(ValueError, match="is no store"):
        AnswerStore(tmp_path, IDENTITY)
    assert (tmp_path / ANSWERS).read_text() == "my own notes\nof years\n"


def test_a_store_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Two would write into each other's lines."""
    with AnswerStore(tmp_path, IDENTITY), pytest.raises(ValueError, match="in use by another process"):
        AnswerStore(tmp_path, IDENTITY)


def test_features_of_another_width_are_refused(tmp_path: Path) -> None:
    """They would shift all rows behind them."""
    with AnswerStore(tmp_path, IDENTITY) as store, pytest.raises(ValueError, match="3 columns"):
        store.add("k", (1,), "stop", np.zeros((1, 4), np.uint16))
