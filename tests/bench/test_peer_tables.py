"""Tables of a comparison with peers, and their place in a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.bench.peer_tables import (
    Kind,
    check_markers,
    compare_speeds,
    peers_table,
    relative_cost,
    write_between,
)

RATE = Kind("decode", "decode", "tokens/s")
ONE, FOUR = (Kind(f"step{n}", f"step of {n}", "ms", 2, time=True) for n in (1, 4))


def test_above_one_is_faster_for_rates_and_times() -> None:
    """Twice the rate and half the time are both a ratio of 2."""
    rate = {"us": [20.0] * 5, "them": [10.0] * 5}
    time = {"us": [10.0] * 5, "them": [20.0] * 5}
    assert compare_speeds(RATE, rate, "us", "them").ratio.median == 2
    assert compare_speeds(ONE, time, "us", "them").ratio.median == 2
    assert compare_speeds(ONE, time, "us", "them").rounds == time


def test_the_cost_of_a_draft_is_relative_to_the_same_round() -> None:
    """What the machine does from round to round cancels in V."""
    base = {"us": [1.0, 5.0, 2.0]}
    assert relative_cost({"us": [1.5, 7.5, 3.0]}, base, "us") == 1.5


def test_a_line_for_each_figure_and_each_peer_that_has_it() -> None:
    """A peer without a figure has no line for it, a figure without peers none at all; a difference within the
    spread is undecided."""
    found = {
        "decode": {
            "us": [10.0, 11.0, 9.0, 10.0, 10.5],
            "fast": [20.0] * 5,
            "same": [10.5, 10.0, 10.0, 9.5, 10.0],
        },
        "step1": {"us": [1.0] * 5, "fast": [2.0] * 5},
        "step4": {"us": [1.5] * 5, "fast": [6.0] * 5},
        "alone": {"us": [1.0] * 5},
    }
    kinds = (RATE, ONE, FOUR, Kind("alone", "alone", "s"), Kind("missing", "missing", "s"))
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in peers_table(kinds, found, "us", "step1").splitlines()[2:]
    ]
    assert [line[:2] for line in lines] == [
        ["decode, tokens/s", "fast"],
        ["decode, tokens/s", "same"],
        ["step of 1, ms", "fast"],
        ["step of 4, ms", "fast"],
    ]
    assert lines[0][4].startswith("0.500")
    assert lines[1][4].startswith("undecided")
    assert [cell.partition(", V ")[2] for cell in lines[2][2:4]] == ["", ""]
    assert [cell.partition(", V ")[2] for cell in lines[3][2:4]] == ["1.50", "3.00"]
    assert [line[4].split()[0] for line in lines[2:]] == ["2.000", "4.000"]


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    """Text around them, and other tables, stay; writing again replaces."""
    path = tmp_path / "benchmarks.md"
    other = "<!-- peers:other begin -->\nkept\n<!-- peers:other end -->"
    path.write_text(f"# Top\n<!-- peers:a begin --><!-- peers:a end -->\n{other}\n", encoding="utf-8")
    write_between(path, "a", "old table")
    write_between(path, "a", "new table\n")
    assert path.read_text(encoding="utf-8") == (
        f"# Top\n<!-- peers:a begin -->\n\nnew table\n\n<!-- peers:a end -->\n{other}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- peers:a begin -->",
        "<!-- peers:a end --> <!-- peers:a begin -->",
        "<!-- peers:a begin --> <!-- peers:a begin --> <!-- peers:a end -->",
    ],
)
def test_a_document_without_the_place_is_refused(tmp_path: Path, text: str) -> None:
    """Missing, lone, doubled and swapped markers are an error that names file and markers, and nothing is
    written."""
    path = tmp_path / "benchmarks.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"benchmarks\.md: needs one line '<!-- peers:a begin -->'"):
        check_markers(path, "a")
    with pytest.raises(ValueError, match="peers:a end"):
        write_between(path, "a", "table")
    assert path.read_text(encoding="utf-8") == text
