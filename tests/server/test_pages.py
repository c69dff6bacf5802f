"""The page for people, its data, and what every answer of the page forbids the browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.server.serving import Running, byte_tokenizer, served

from octavo.deployment import Row
from octavo.server.pages import FILES


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


class Evil:
    """A deployment whose rows would run if they were not escaped."""

    def rows(self) -> tuple[Row, ...]:
        return (Row("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b $model ${x} $"),)


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    linked = [attrs.get("src") or attrs.get("href") for _, attrs in Tags(page.text).found]
    for link in filter(None, linked):
        assert link.startswith("/"), link
        assert server.get(link).status_code == 200, link
    for text in (page.text, *(server.get(f"/static/{name}").text for name in FILES)):
        assert "http://" not in text.replace('xmlns="http://www.w3.org/2000/svg"', ""), "a name, not a link"
        assert "https://" not in text
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script>|<style>| on\w+=|javascript:", page.text), "the policy would stop it"


def test_everything_shown_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(served_model_names=('<b>"mine"</b>',)) as server:
        monkeypatch.setattr(server.service.llm.engine, "deployment", Evil())
        text = server.get("/").text
        names = {tag for tag, _ in Tags(text).found}
        assert "img" not in names
        assert "b" not in names
        assert [attrs for tag, attrs in Tags(text).found if tag == "script"] == [
            {"src": "/static/page.js", "defer": None}
        ]
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "a &amp; b $model ${x} $" in text
        assert next(attrs for tag, attrs in Tags(text).found if tag == "body")["data-model"] == '<b>"mine"</b>'


def test_the_script_sets_text_and_never_html(server: Running) -> None:
    script = server.get("/static/page.js").text
    assert "textContent" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def test_the_page_shows_what_runs_here_and_knows_whether_it_chats(server: Running) -> None:
    text = server.get("/").text
    assert 'data-mode="chat"' in text
    assert "echo" in text
    with served(tokenizer=byte_tokenizer(None)) as plain:
        assert 'data-mode="completion"' in plain.get("/").text


def test_the_data_of_the_page_is_that_of_the_metrics(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})
    server.until_empty()
    now = server.get("/stats").json()
    exposed = server.get("/metrics").text
    assert now["state"] == "ready"
    for name in ("admissions_total", "kv_capacity_bytes", "active_sequences"):
        (line,) = [x for x in exposed.splitlines() if x.startswith(f"octavo_{name}{{")]
        assert float(line.rsplit(" ", 1)[1]) == now[name]
    # Every figure that the script reads is there.
    for name in re.findall(r"\b(?:now|stats)\.(\w+)", server.get("/static/page.js").text):
        assert name in now, name
    tokens = now["time_to_first_token_seconds"]["count"] + now["inter_token_latency_seconds"]["count"]
    assert tokens >= 5


def test_behind_a_proxy_that_strips_its_path_links_carry_it() -> None:
    with served(root_path="/octavo") as server:
        links = [attrs.get("src") or attrs.get("href") for _, attrs in Tags(server.get("/").text).found]
        assert {link for link in links if link} >= {"/octavo/static/page.js", "/octavo/metrics"}
        assert server.get("/static/page.js").status_code == 200
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200
    with served(root_path="/octavo", api_keys=("k",)) as server:
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", {"prompt": "abc"}).status_code == 401


def test_pages_elsewhere_may_call_only_where_they_are_allowed() -> None:
    asking = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
              "Access-Control-Request-Headers": "content-type,authorization"}  # fmt: skip
    with served(allowed_origins=("https://app.example",), api_keys=("k",)) as server:
        allowed = server.client.options("/v1/completions", headers=asking)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = server.client.options("/v1/completions", headers=asking | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = server.post("/v1/completions", {}, headers={"Origin": "https://app.example"})
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
    with served() as server:
        assert server.client.options("/v1/completions", headers=asking).status_code == 405


@pytest.mark.parametrize("add", [True, False])
def test_a_text_goes_to_tokens_and_back(server: Running, add: bool) -> None:
    """vLLM's shapes."""
    asked = {"prompt": "삼 hi", "add_special_tokens": add, "return_token_strs": True}
    made = server.post("/tokenize", asked).json()
    assert made["count"] == len(made["tokens"]) == 6
    assert made["max_model_len"] == 2048
    assert made["token_strs"][-1] == "i"
    assert server.post("/tokenize", {"prompt": "hi"}).json()["token_strs"] is None
    assert server.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "삼 hi"}


def test_a_long_text_is_encoded_beside_the_event_loop(server: Running) -> None:
    """The rest is answered meanwhile, and the answer is the same."""
    text = "삼겹살 " * 50_000
    made = server.post("/tokenize", {"prompt": text}).json()
    assert made["count"] == len(text.encode())
