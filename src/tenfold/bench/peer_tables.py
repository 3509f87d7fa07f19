"""What a comparison with peers found, as a table, and the place in a document where the table is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tenfold.bench.figures import Comparison, figure, paired_ratio, table

Rounds = Mapping[str, Sequence[float]]
"""A figure of each side, round by round."""


class Kind(msgspec.Struct, frozen=True):
    """A figure that is compared."""

    key: str
    label: str
    unit: str
    digits: int = 1
    time: bool = False
    """Less is better; else it is a rate and more is better."""


def compare_speeds(kind: Kind, rounds: Rounds, ours: str, theirs: str) -> Comparison:
    """One side beside another. The ratio is that of speeds, above 1 where ``ours`` is the faster, for times
    as for rates. Raises ValueError as `paired_ratio` does."""
    first, second = rounds[ours], rounds[theirs]
    ratio = paired_ratio(second, first) if kind.time else paired_ratio(first, second)
    return Comparison({ours: list(first), theirs: list(second)}, ratio)


def relative_cost(rounds: Rounds, base: Rounds, side: str) -> float:
    """The median over rounds of a time of ``side`` relative to another time of the same round."""
    pairs = zip(rounds[side], base[side], strict=True)
    return figure([time / unit for time, unit in pairs]).median


def peers_table(kinds: Sequence[Kind], found: Mapping[str, Rounds], ours: str, step_base: str) -> str:
    """A Markdown table: a line for each figure and each side that has it beside ``ours``.

    ``found`` has the rounds by `Kind.key`; a figure without peers is left out. Times that are steps of
    several rows (keys that start as ``step_base`` does, up to its number) have their cost relative to
    ``step_base`` beside them, as V.
    """
    stem = step_base.rstrip("0123456789")
    lines = []
    for kind in kinds:
        rounds = found.get(kind.key, {})
        costs = kind.key != step_base and kind.key.startswith(stem)

        def cell(side: str, kind: Kind = kind, rounds: Rounds = rounds, costs: bool = costs) -> str:
            text = figure(rounds[side]).text(kind.digits)
            return f"{text}, V {relative_cost(rounds, found[step_base], side):.2f}" if costs else text

        for theirs in rounds:
            if theirs != ours:
                ratio = compare_speeds(kind, rounds, ours, theirs).ratio.text()
                lines.append((f"{kind.label}, {kind.unit}", theirs, cell(ours), cell(theirs), ratio))
    return table(("figure", "beside", ours, "the other", f"speed of {ours} / the other's"), lines)


def check_markers(path: Path, name: str) -> tuple[int, int]:
    """Where the text between the markers of ``name`` begins and ends in the document. Raises ValueError when
    they are not there once each, in order; OSError when the document cannot be read."""
    text = path.read_text(encoding="utf-8")
    begin, end = (f"<!-- peers:{name} {which} -->" for which in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path}: needs one line {begin!r} and after it one line {end!r}")
    return text.index(begin) + len(begin), text.index(end)


def write_between(path: Path, name: str, content: str) -> None:
    """Puts ``content`` between the markers of ``name``, in place of what is there; see `check_markers`."""
    begin, end = check_markers(path, name)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text[:begin]}\n\n{content.strip()}\n\n{text[end:]}", encoding="utf-8")
