"""Recent answers: bounded, and whatever happens to the disk costs answers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tenfold.live import store as live_store
from tenfold.live.store import LiveStore, read_live
from tenfold.traffic.store import ANSWERS, FEATURES, AnswerStore, Identity, Origin

IDENTITY = Identity(model="m", format="q8", kv_format="bf16", taps=("a",), width=6)
ORIGIN = Origin(temperature=0.5, seed=2**64 - 1, position=3, conversation="c", time=1.5)
ROW = 2 * 6 + 8


def rows(count: int, value: int) -> Any:
    return np.full((count, 6), value, np.uint16)


def values(folder: Path) -> list[int]:
    """The first feature of each answer that is kept."""
    return [int(features[0, 0]) for _, features in read_live(folder)[1]]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob(FEATURES))


def test_answers_come_back_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    """In their order, also while the store is open, and after it was opened again."""
    for _ in range(2):
        kept = LiveStore(tmp_path, IDENTITY)
        assert kept.add([1, 2, 3], "length", rows(2, 7), ORIGIN) == 2
        assert kept.add([4, 5], "stop", rows(2, 8), ORIGIN) == 2
        identity, found = read_live(tmp_path)
        kept.close()
    assert identity == IDENTITY
    assert [answer.tokens for answer, _ in found] == [(1, 2, 3), (4, 5)] * 2
    assert {answer.origin for answer, _ in found} == {ORIGIN}
    np.testing.assert_array_equal(found[2][1], rows(2, 7))


def test_a_store_that_has_just_begun_or_gone_is_passed_over(tmp_path: Path) -> None:
    """A training reads while the server goes on."""
    kept = LiveStore(tmp_path, IDENTITY)
    kept.add([1] * 5, "stop", rows(5, 3), ORIGIN)
    (tmp_path / "answers-000002").mkdir()
    (tmp_path / "answers-000003").mkdir()
    (tmp_path / "answers-000003" / ANSWERS).touch()
    (tmp_path / "answers-000003" / FEATURES).touch()
    assert values(tmp_path) == [3]
    kept.close()
    with pytest.raises(ValueError, match="no answers"):
        read_live(tmp_path / "answers-000002")


def test_the_oldest_go_and_the_newest_stay_within_the_bound(tmp_path: Path) -> None:
    """At every moment no more is kept than may be, and at least half of that once there was as much, over
    restarts too."""
    most = 40 * ROW
    kept = LiveStore(tmp_path, IDENTITY, most)
    assert kept.capacity == 20
    for number in range(60):
        assert kept.add([1] * 5, "stop", rows(5, number), ORIGIN) == 5
        assert size(tmp_path) <= most
        left = values(tmp_path)
        assert left == list(range(number + 1))[-len(left) :]
        assert len(left) >= min(number + 1, 4)
        if number % 7 == 0:
            kept.close()
            kept = LiveStore(tmp_path, IDENTITY, most)
    kept.close()


def test_answers_of_another_model_or_damaged_ones_are_removed(tmp_path: Path) -> None:
    """They are of no use; what is half written is cut off, what is whole before it stays."""
    kept = LiveStore(tmp_path, IDENTITY, 40 * ROW)
    for number in range(6):
        kept.add([1] * 5, "stop", rows(5, number), ORIGIN)
    kept.close()
    first, second = sorted(tmp_path.iterdir())
    with (second / FEATURES).open("r+b") as file:
        file.truncate(5 * 12 + 7)
    kept = LiveStore(tmp_path, IDENTITY, 40 * ROW)
    assert values(tmp_path) == [0, 1, 2, 3, 4]
    kept.close()
    (first / ANSWERS).write_bytes(b"nonsense\n")
    kept = LiveStore(tmp_path, IDENTITY, 40 * ROW)
    kept.add([1] * 5, "stop", rows(5, 9), ORIGIN)
    assert values(tmp_path) == [4, 9]
    kept.close()
    other = LiveStore(tmp_path, msgspec.structs.replace(IDENTITY, model="other"), 40 * ROW)
    other.add([1] * 5, "stop", rows(5, 11), ORIGIN)
    assert values(tmp_path) == [11]
    other.close()


def test_a_full_disk_costs_answers_and_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised, the log says it once, it is not tried at every answer, and when there is room again
    the store goes on behind what was whole."""
    kept = LiveStore(tmp_path, IDENTITY)
    kept.add([1] * 5, "stop", rows(5, 1), ORIGIN)
    real, full = AnswerStore._write, [True]

    def write(self: AnswerStore, content: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        real(self, content)

    now = [1000.0]
    monkeypatch.setattr(AnswerStore, "_write", write)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for _ in range(3):
        assert kept.add([1] * 5, "stop", rows(5, 2), ORIGIN) == 0
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    full[0] = False
    assert kept.add([1] * 5, "stop", rows(5, 3), ORIGIN) == 0
    now[0] += live_store.RETRY_S
    assert kept.add([1] * 5, "stop", rows(5, 4), ORIGIN) == 5
    assert values(tmp_path) == [1, 4]
    kept.close()


def test_a_folder_that_cannot_be_written_does_not_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server serves, and says why it does not learn."""
    (tmp_path / "answers-000001").write_text("a file where a folder should be")
    kept = LiveStore(tmp_path, IDENTITY)
    assert kept.add([1] * 5, "stop", rows(5, 1), ORIGIN) == 0
    assert "cannot be kept" in caplog.text
    with pytest.raises(OSError):
        read_live(tmp_path)
