"""Telling one model's files from another's."""

from __future__ import annotations

from pathlib import Path

from tenfold.checkpoint.fingerprint import fingerprint


def test_a_fingerprint_is_of_what_the_files_say_and_not_of_where_they_are(tmp_path: Path) -> None:
    """A copy has the same; a byte more, or a file of another name, makes another."""
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_bytes(b"x" * 3_000_000)
    b.write_bytes(b"x" * 3_000_000)
    assert fingerprint(a) == fingerprint(b)
    b.write_bytes(b"x" * 3_000_000 + b"y")
    assert fingerprint(a) != fingerprint(b)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(b"12")
    (two / "README.md").write_text("no part of the model")
    assert fingerprint(one) == fingerprint(two)
    (two / "model.safetensors").rename(two / "other.safetensors")
    assert fingerprint(one) != fingerprint(two)
    (two / "other.safetensors").rename(two / "model.safetensors")
    (two / "config.json").write_bytes(b"{}1")
    (two / "model.safetensors").write_bytes(b"2")
    assert fingerprint(one) != fingerprint(two), "where one file ends and the next begins counts"
