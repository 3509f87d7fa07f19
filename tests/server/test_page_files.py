"""The page's files, without a browser."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from tenfold.server.page import FILES
from tests.helpers.server_process import ServerProcess

FOLDER = files("tenfold.server.page")
TEXTS = {name: FOLDER.joinpath(name).read_text() for name, _ in FILES.values()}


@pytest.mark.parametrize("path", FILES)
def test_every_file_comes_with_a_strict_policy(server: ServerProcess, path: str) -> None:
    """GET, HEAD and a second visit; nothing inline or from elsewhere may run."""
    got = httpx.get(server.url + path)
    assert got.status_code == 200
    assert got.headers["content-type"] == FILES[path][1]
    policy = got.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "*" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    head = httpx.head(server.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    again = httpx.get(server.url + path, headers={"if-none-match": got.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_post_to_the_page_is_no_page(server: ServerProcess) -> None:
    """It is passed on, and answered as any path that is not there."""
    assert httpx.post(server.url + "/").status_code == 404


def test_files_name_no_other_host() -> None:
    """No fonts, no libraries, no pictures from anywhere."""
    for name, text in TEXTS.items():
        urls = set(re.findall(r"https?://[^\s\"'<>)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, name


def test_nothing_becomes_markup() -> None:
    """The script has none of the ways to make elements from text; the page has no inline script or style."""
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sink not in TEXTS["page.js"]
    page = TEXTS["index.html"]
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", page)


def palettes() -> list[dict[str, str]]:
    """The colours of the light and the dark page."""
    return [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", TEXTS["page.css"], re.DOTALL)
    ]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_text_can_be_read(palette: dict[str, str]) -> None:
    """At least 4.5 to 1 for every colour of text on every ground it stands on (WCAG 2 AA)."""
    for text, ground in (
        *((text, ground) for text in ("ink", "soft", "accent", "bad") for ground in ("ground", "card")),
        ("ink", "said"),
        ("bad", "bad-soft"),
        ("on-accent", "accent"),
    ):
        assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
