"""The page, in a real browser: Chromium without a screen. Skipped where there is none."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None or importlib.util.find_spec("selenium") is None,
    reason="needs chromium and chromedriver (Debian's packages chromium and chromium-driver), and selenium",
)

SEED = 3
WAIT_S = 60.0
"""For a busy machine; on a quiet one everything here takes a few seconds."""


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Forty tokens a second: an answer can be seen to grow."""
    log = tmp_path_factory.mktemp("page") / "log"
    with running_server(log, FakeConfig(delay_s=0.025)) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for all tests; its logs are read as they go."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "window-size=1200,900",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


class Seen:
    """The page as somebody sees it."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.logs("browser")
        self.logs("performance")
        browser.get(f"{url}/")

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has logged since the last time."""
        found: list[dict[str, Any]] = self.browser.get_log(kind)
        return found

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of the last element that fits, exactly; nothing if there is none."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        return str(self.browser.execute_script(script, selector))

    def wait(self, probe: Callable[[], Any]) -> Any:
        return wait_for(probe, WAIT_S)

    def set(self, field: str, value: object) -> None:
        element = self.find(f"#{field}")
        element.clear()
        element.send_keys(str(value))

    def ask(self, message: str) -> None:
        """With the keyboard alone."""
        from selenium.webdriver import Keys

        self.find("#message").send_keys(message + Keys.ENTER)

    def answered(self) -> bool:
        return bool(self.find("#send").is_displayed())


def test_a_chat_streams_and_the_figures_move(browser: Chrome, slow_server: ServerProcess) -> None:
    """The very text of the model arrives bit by bit, as text; nothing fails, and nobody else is asked."""
    page = Seen(browser, slow_server.url)
    page.wait(lambda: page.text("#state") == "ready")
    assert page.text("#model") == "fake"
    said = "<img src=x onerror=alert(1)>"
    whole = expected.chat_text(said, SEED, 55)
    assert "<" in whole or "&" in whole or '"' in whole, "choose a seed whose text would matter as markup"
    page.set("seed", SEED)
    page.set("max_tokens", 55)
    page.ask(said)
    grown = page.wait(lambda: page.text(".assistant .text"))
    assert whole.startswith(grown) and grown != whole
    page.wait(lambda: page.text('[data-figure="running"]') == "1")
    page.wait(page.answered)
    assert page.text(".assistant .text") == whole
    assert page.text(".user .text") == said
    assert browser.execute_script("return document.querySelectorAll('.text *').length") == 0
    footer = page.text(".assistant .foot")
    assert "55 tokens" in footer and "cut at the most tokens" in footer and "first token" in footer
    page.wait(lambda: float(page.text('[data-figure="speed"]')) > 0)
    page.wait(lambda: page.text('[data-figure="ttft"]').endswith("s"))
    page.wait(lambda: page.text('[data-figure="cache"]').endswith("%"))
    assert page.text('[data-figure="kv"]').endswith("MiB")
    assert [entry for entry in page.logs("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    hosts = {
        message["params"]["request"]["url"]
        for entry in page.logs("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    }
    assert f"{slow_server.url}/v1/chat/completions" in hosts
    assert all(url.startswith(f"{slow_server.url}/") for url in hosts)


def test_a_second_message_carries_the_first(browser: Chrome, slow_server: ServerProcess) -> None:
    """The conversation is sent whole; a new chat forgets it."""
    page = Seen(browser, slow_server.url)
    page.set("seed", SEED)
    page.set("max_tokens", 5)
    page.ask("One")
    page.wait(lambda: "5 tokens" in page.text(".foot"))
    first = page.text(".assistant .text")
    page.ask("Two")
    page.wait(lambda: len(browser.find_elements("css selector", ".foot")) == 2)
    assert page.text(".assistant .text") == expected.text(f"user:One|assistant:{first}|user:Two|", SEED, 5)
    page.find("#new").click()
    page.ask("One")
    page.wait(lambda: "5 tokens" in page.text(".foot"))
    assert page.text(".assistant .text") == first


@pytest.mark.parametrize("by", ["button", "key"])
def test_an_answer_can_be_stopped(browser: Chrome, slow_server: ServerProcess, by: str) -> None:
    """The text so far stays, and the server stops too."""
    from selenium.webdriver import Keys

    aborted = slow_server.metric('tenfold_requests_total{finish="abort"}')
    page = Seen(browser, slow_server.url)
    page.ask("Tell me a long story")
    page.wait(lambda: page.text(".assistant .text"))
    if by == "button":
        page.find("#stop").click()
    else:
        page.find("#message").send_keys(Keys.ESCAPE)
    page.wait(page.answered)
    assert page.text(".assistant .text")
    assert "stopped by you" in page.text(".assistant .foot")
    wait_for(lambda: slow_server.metric('tenfold_requests_total{finish="abort"}') == aborted + 1, WAIT_S)


def test_an_error_is_shown_and_the_message_kept(browser: Chrome, slow_server: ServerProcess) -> None:
    """The server's own words, as an alert; the message can be mended and sent again."""
    page = Seen(browser, slow_server.url)
    page.set("seed", "99999999999999999999")
    page.ask("Hello")
    alert = page.wait(lambda: page.text('[role="alert"]'))
    assert "seed is 99999999999999999999" in alert
    assert page.find("#seed").get_attribute("aria-invalid") == "true"
    page.wait(page.answered)
    assert page.find("#message").get_attribute("value") == "Hello"


def test_a_key_is_asked_for(browser: Chrome, tmp_path: Path) -> None:
    """A wrong one is refused and asked for again; with the right one everything works."""
    from selenium.webdriver import Keys

    keys = tmp_path / "keys"
    keys.write_text("sesame-open\n")
    keys.chmod(0o600)
    with running_server(tmp_path / "log", api_key_file=str(keys)) as server:
        page = Seen(browser, server.url)
        for key in ("wrong", "sesame-open"):
            page.wait(lambda: page.find("#key").get_property("open"))
            page.find("#key-value").send_keys(key + Keys.ENTER)
        page.wait(lambda: page.text("#state") == "ready")
        page.set("max_tokens", 4)
        page.ask("Hi")
        page.wait(lambda: "4 tokens" in page.text(".foot"))


def test_it_fits_a_phone_and_a_screen_reader(browser: Chrome, slow_server: ServerProcess) -> None:
    """360 pixels wide nothing is cut off; every field and button has a name."""
    size = {"width": 360, "height": 720, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page = Seen(browser, slow_server.url)
        page.wait(lambda: page.text("#state") == "ready")
        width, height = browser.execute_script(
            "const e = document.scrollingElement; return [e.scrollWidth, e.scrollHeight]"
        )
        assert (width, height) == (360, 720)
        page.set("message", "word " * 200)
        for selector in ("#send", "#message", "#settings summary", "#new"):
            box = page.find(selector).rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= 360, selector
            assert box["y"] >= 0 and box["y"] + box["height"] <= 720, selector
        nameless = browser.execute_script(
            "return [...document.querySelectorAll('input, textarea, button, summary')].filter(e =>"
            "  !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).map(e => e.id)"
        )
        assert nameless == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_model_is_chosen_among_several(browser: Chrome, tmp_path: Path) -> None:
    """Its figures are shown, and it is the one that is asked; one alone is no choice. When it is unloaded
    the page goes on with another."""
    from selenium.webdriver.support.select import Select

    keys = tmp_path / "admins"
    keys.write_text("admin-key")
    keys.chmod(0o600)
    first, second = (FakeConfig(scripts={"who": name}) for name in ("I am the first", "I am the second"))
    with running_server(
        tmp_path / "log", first, others={"second": second}, admin_key_file=str(keys)
    ) as server:
        page = Seen(browser, server.url)
        page.wait(lambda: page.find("#models").is_displayed())

        def shown(name: str) -> bool:
            return name in browser.title

        assert not page.find("#model").is_displayed()
        for name, said in (("second", "I am the second"), ("fake", "I am the first")):
            Select(page.find("#models")).select_by_visible_text(name)
            page.wait(partial(shown, name))
            page.find("#new").click()
            page.ask("@who@")
            page.wait(page.answered)
            assert page.text(".assistant .text") == said
            assert page.text(".assistant h2") == name
        Select(page.find("#models")).select_by_visible_text("second")
        page.wait(partial(shown, "second"))
        gone = httpx.delete(
            f"{server.url}/admin/models/second", headers={"x-api-key": "admin-key"}, timeout=60
        )
        assert gone.status_code == 200
        page.wait(lambda: page.find("#model").is_displayed() and page.text("#model") == "fake")
        assert not page.find("#models").is_displayed()
        page.wait(lambda: page.text("#state") == "ready")
        failed = [entry for entry in page.logs("browser") if "404" not in entry["message"]]
        assert failed == []
