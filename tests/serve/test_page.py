"""The page in a real Chromium with a fake microphone, on the endpoint in this process; and as Serve gives it out.

Screenshots of the page at work are left in out/page.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import pytest_asyncio
import soundfile
from playwright.async_api import Browser, Page, WebSocketRoute, async_playwright, expect

from a2t.data.espeak import SAMPLE_RATE, Espeak
from serve_apps.access import Access
from serve_apps.web import PAGE
from tests.serve.endpoint import Endpoint, endpoint

one_loop = pytest.mark.asyncio(loop_scope="module")

CHROMIUM = os.environ.get("A2T_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = Path(__file__).parents[2] / "out" / "page"
PATIENCE_MS = 120_000  # this machine may be busy with something else
expect.set_options(timeout=PATIENCE_MS)  # 5 s by default
BUDGET = 120
SENTENCE = "please tell me a story about a garden"
KINDS = ["prefix", "transcript", "response", "audio", "structure"]


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence and some silence, to be heard over and over."""
    path = tmp_path_factory.mktemp("page") / "speech.wav"
    quiet = np.zeros(5 * SAMPLE_RATE, np.float32)
    soundfile.write(path, np.concatenate([Espeak().say(SENTENCE, rate=160).pcm_S, quiet]), SAMPLE_RATE, "PCM_16")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(speech: Path) -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    microphone = ["--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={speech}"]
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *microphone])
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    """With the embedded model: what it hears and answers is to make sense."""
    async with endpoint(rows=1, model="serve_apps.models:embedded", capacity=4096, resume_grace_s=30.0) as running:
        yield running


class Sockets:
    """Stands between the page and the server, to cut the line."""

    def __init__(self) -> None:
        self.open: list[WebSocketRoute] = []

    def route(self, ws: WebSocketRoute) -> None:
        ws.connect_to_server()
        self.open.append(ws)

    async def cut(self) -> None:
        await self.open[-1].close()


@asynccontextmanager
async def visit(browser: Browser, address: str, microphone: bool = True, **options: Any) -> AsyncIterator[Page]:
    """The page, which must not fail at anything nor ask another host."""
    context = await browser.new_context(permissions=["microphone"] if microphone else [], **options)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).netloc))
    await page.goto(address)
    yield page
    assert not errors
    assert hosts == {urlsplit(address).netloc}
    await context.close()


async def settle(page: Page, condition: str) -> Any:
    """Waits until an expression is true, and returns it. (Playwright's own way of waiting is what the page's content
    security policy forbids.)"""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not (value := await page.evaluate(condition)):
            await asyncio.sleep(0.1)
    return value


async def shot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


async def sounds(page: Page) -> None:
    """Waits until the answer is really heard: samples are scheduled, and the meter before the loudspeaker moves."""
    await settle(page, "window.a2t.player.scheduled > 0 && window.a2t.player.level > 0.001")


@one_loop
async def test_talking_by_microphone(browser: Browser, server: Endpoint) -> None:
    sockets = Sockets()
    async with visit(browser, server.address, viewport={"width": 1000, "height": 1400}) as page:
        await page.route_web_socket("**/v1/realtime**", sockets.route)
        await page.get_by_text("Settings", exact=True).click()
        await page.get_by_label("Budget").fill(str(BUDGET))
        await page.get_by_text("Settings", exact=True).click()
        await page.keyboard.press("Shift+Tab")
        while await page.evaluate("document.activeElement.id") != "talk":  # by keyboard alone
            await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_text(re.compile("Listening|Speaking"))

        await settle(page, "document.querySelector('.hears')?.textContent.includes('story')")
        await sounds(page)
        await expect(page.locator(".says").first).to_be_visible()
        evicted = "Number(document.getElementById('count-evicted').value.replace(',', ''))"
        await settle(page, f"{evicted} > 20")
        drawn = await page.evaluate(  # at once: they are drawn anew every second
            "Object.fromEntries([...document.querySelectorAll('svg.chart [class], svg.chart [data-kind]')].map((e) =>"
            " [e.dataset.kind ?? e.classList[0], [e.getBBox().width, e.getBBox().height]]))"
        )
        for mark in (*KINDS, "without", "evicted", "unit"):
            wide, high = drawn[mark]
            assert wide > 50 and high > 1, mark
        assert drawn["budget"][0] > 500 and drawn["deadline"][0] > 500
        label = await page.locator("#memory").get_attribute("aria-label")
        assert label is not None
        total, without = (int(n) for n in re.findall(r"(\d+) positions.* would be (\d+)", label.replace(",", ""))[0])
        assert f"budget of {BUDGET}" in label
        assert without >= total + 20

        mine = await settle(page, "document.querySelector('#sessions tr.mine')?.textContent")
        assert "live" in mine
        (view,) = await server.settled(live=1)
        assert mine.startswith(view["id"].removeprefix("sess_")[:8])

        await page.get_by_label("Ask about the conversation").fill("who are you")
        await page.keyboard.press("Enter")
        await settle(page, "document.getElementById('answer-1')?.textContent.includes('—')")
        await shot(page, "talk")

        before = view["units"]
        await sockets.cut()
        await expect(page.locator("#status")).to_have_text("The connection dropped. Taking it up again…")
        await expect(page.locator("#status")).to_have_text(re.compile("Connected again|Listening|Speaking"))
        await page.get_by_text("The same as a table").click()
        seconds = "[...document.querySelectorAll('#figures-body tr td:first-child')].map((td) => td.textContent)"
        units = await settle(page, f"{seconds}.length > {before + 3} && {seconds}")
        assert units == [f"00:{unit:02d}" for unit in reversed(range(len(units)))]  # none is missing, none comes twice
        assert len(sockets.open) >= 2

        await page.get_by_role("button", name="End").click()
        await expect(page.locator("#status")).to_have_text("The conversation has ended.")
        await server.empty()


@one_loop
async def test_a_file_is_dropped_on_a_phone_in_the_dark(browser: Browser, server: Endpoint, speech: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}
    async with visit(browser, server.address, microphone=False, **phone) as page:
        bright = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(n) for n in re.findall(r"\d+", bright)[:3]) < 60
        files = await page.evaluate_handle(
            """(wav) => {
                const held = new DataTransfer();
                const bytes = Uint8Array.from(atob(wav), (c) => c.charCodeAt(0));
                held.items.add(new File([bytes], "speech.wav", { type: "audio/wav" }));
                return held;
            }""",
            base64.b64encode(speech.read_bytes()).decode(),
        )
        await page.locator("#talk").tap()  # sound needs a gesture; this one is refused a microphone
        await expect(page.locator("#trouble")).to_contain_text("The microphone was refused")
        await page.dispatch_event("body", "dragover", {"dataTransfer": files})
        await expect(page.locator("#drop")).to_be_visible()
        await page.dispatch_event("body", "drop", {"dataTransfer": files})
        await expect(page.locator("#trouble")).to_be_hidden()
        await settle(page, "document.querySelector('.hears')?.textContent.includes('story')")
        await sounds(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await shot(page, "phone")
        await page.get_by_role("button", name="End").click()
        await server.empty()


@one_loop
async def test_what_it_says_when_something_is_in_the_way(browser: Browser) -> None:
    trouble = "#trouble"
    async with endpoint(rows=1, access=Access(keys=("sesame",))) as server, visit(browser, server.address) as page:
        await page.get_by_role("button", name="Talk").click()
        await expect(page.locator(trouble)).to_contain_text("The key is wrong")
        await page.get_by_text("Settings", exact=True).click()
        await page.get_by_label("Key").fill("öffne dich")  # which no header can carry
        await page.get_by_role("button", name="Talk").click()
        await expect(page.locator(trouble)).to_contain_text("The key is wrong")
        await page.get_by_label("Key").fill("sesame")
        await page.get_by_role("button", name="Talk").click()
        await expect(page.locator("#status")).to_have_text(re.compile("Listening|Speaking"))
        await expect(page.locator(trouble)).to_be_hidden()

        async with visit(browser, server.address) as second:
            await second.get_by_text("Settings", exact=True).click()
            await second.get_by_label("Key").fill("sesame")
            await second.get_by_role("button", name="Talk").click()
            await expect(second.locator("#status")).to_contain_text("The server is full. You are number 1 in line")
            await page.get_by_role("button", name="End").click()
            await expect(second.locator("#status")).to_have_text(re.compile("Listening|Speaking"))
            await second.get_by_role("button", name="End").click()
        await page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no sound"})
        await expect(page.locator(trouble)).to_contain_text("notes.txt is no audio file")
        await page.route("**/v1/**", lambda route: route.abort())
        await page.route_web_socket("**/v1/realtime**", lambda ws: ws.close())
        await page.get_by_role("button", name="Talk").click()
        await expect(page.locator(trouble)).to_contain_text("The server cannot be reached")


@one_loop
async def test_everything_has_a_name(browser: Browser, server: Endpoint) -> None:
    """For whoever hears the page instead of seeing it."""
    async with visit(browser, server.address) as page:
        tree = await page.locator("body").aria_snapshot()
        await page.get_by_text("Settings", exact=True).click()
        for control in await page.locator("button, input, textarea, summary, svg[role=img], [role=log]").all():
            name = await control.evaluate(
                "(e) => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent || "
                "document.getElementById(e.getAttribute('aria-labelledby'))?.textContent"
            )
            assert name and name.strip(), await control.evaluate("(e) => e.outerHTML")
        assert await page.locator("[aria-live], [role=status], [role=alert], [role=log]").count() >= 4
    for line in ('heading "a2t"', 'button "Talk"', "status", 'log "What it hears and answers"', "banner", "main"):
        assert f"- {line}" in tree


def contrast(one: str, other: str) -> float:
    """Of two #rrggbb colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_what_is_written_and_drawn_stands_out(mode: str) -> None:
    """WCAG's AA: 4.5 to 1 for text, 3 to 1 for what is drawn and for what can be pressed."""
    css = (PAGE / "page.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colour = {name: light if mode == "light" else dark for name, light, dark in pairs}
    assert {*KINDS, "evicted", "without", "ink", "soft", "edge"} <= set(colour)
    for behind in ("panel", "ground"):
        for text in ("ink", "soft", "accent", "bad", "transcript", "response"):
            assert contrast(colour[text], colour[behind]) >= 4.5, (text, behind)
        for drawn in (*KINDS, "evicted", "without", "edge"):
            assert contrast(colour[drawn], colour[behind]) >= 3, (drawn, behind)
    for text, behind in (("on-accent", "accent"), ("bad", "bad-ground"), ("ground", "bad")):
        assert contrast(colour[text], colour[behind]) >= 4.5, (text, behind)


def test_the_bundle_names_no_other_host() -> None:
    texts = {path: path.read_text() for path in PAGE.iterdir()}
    assert {"index.html", "page.css", "main.js"} <= {path.name for path in texts}
    urls = {url for text in texts.values() for url in re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text)}
    assert urls <= {"http://www.w3.org/2000/svg", "http://127.0.0.1"}
