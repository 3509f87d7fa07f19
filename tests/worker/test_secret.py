"""The secret's file, and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenfold.worker.secret import load_secret, parse_address


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_a_private_file_with_a_long_line_is_a_secret(tmp_path: Path) -> None:
    """Promise: what `openssl rand -hex 32` writes is taken, without its line's end."""
    assert load_secret(written(tmp_path, "ab" * 32 + "\n")) == b"ab" * 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    """Promise: a secret that is none is an error that says what to do."""
    with pytest.raises(ValueError, match="chmod 600"):
        load_secret(written(tmp_path, "ab" * 32, mode))


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    """Promise: as is one that could be guessed; the error does not quote it."""
    with pytest.raises(ValueError, match=r"has 6 characters.*openssl rand") as caught:
        load_secret(written(tmp_path, "hunter\n"))
    assert "hunter" not in str(caught.value)


def test_addresses() -> None:
    """Promise: host and port, of both families; everything else is refused by the option's name."""
    assert parse_address("10.0.0.1:7001", "join") == ("10.0.0.1", 7001)
    assert parse_address("[fd00::1]:7001", "join") == ("fd00::1", 7001)
    for wrong in ("", "7001", ":7001", "host", "host:", "host:x", "host:70000", "fd00::1:7001", "host:-1"):
        with pytest.raises(ValueError, match=r"join is .*write it like"):
            parse_address(wrong, "join")
