"""The page in a real browser: it loads, chats, counts, and takes nothing that a model says for markup.

Skipped, with the reason, where there is no browser. The engine echoes the conversation, so an answer begins
with the role and the text of the first message.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.serving import PATIENCE_S, Slow, byte_tokenizer, make_core, served
from tools.browser import MISSING, Tab, browser, find_browser

from octavo.policy.bundle import Policies

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)
EVIL = '<img src=x onerror="document.title=\'taken\'"><b>bold</b><script>document.title="taken"</script> 삼 👋🏽 &amp;'
IDLE = "document.querySelector('#send').disabled === false"


@pytest.fixture(scope="module")
def opened() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(opened: Tab) -> Tab:
    opened.open("about:blank")  # the page before still asks its server, which has gone
    opened.complaints.clear()
    return opened


def text(tab: Tab, selector: str) -> str:
    return tab.evaluate(f"document.querySelector('{selector}').textContent")


def turns(tab: Tab) -> list[str]:
    return tab.evaluate("[...document.querySelectorAll('.turn')].map((one) => one.textContent)")


def ask(tab: Tab, words: str) -> None:
    tab.type("#text", words)
    tab.press_enter()


def test_the_chat_box_streams_an_answer_and_the_counters_move(tab: Tab) -> None:
    executor = Slow(0.01)
    with served(make_core(executor)) as server:
        tab.open(f"{server.url}/")
        tab.until("document.querySelector('#state').textContent === 'ready'")
        assert text(tab, "strong") == "echo"
        assert text(tab, "#requests") == text(tab, "#running") == "0"
        assert tab.evaluate("document.querySelector('#pool').value") == 0
        executor.gate.clear()
        ask(tab, "hello there, all of you")
        tab.until("document.querySelector('#running').textContent === '1'")
        tab.until("document.querySelector('#pool').value > 0")
        assert turns(tab) == ["hello there, all of you", ""]
        executor.gate.set()
        # An answer of some 30 tokens, seen as it grows.
        tab.until("document.querySelector('.assistant').textContent.length > 2")
        part = turns(tab)[1]
        tab.until(IDLE)
        whole = turns(tab)[1]
        assert whole == "user\nhello there, all of you"
        assert whole.startswith(part)
        assert len(part) < len(whole)
        assert "blocks of KV cache" in text(tab, ".cost")
        tab.until("document.querySelector('#running').textContent === '0'")
        tab.until("document.querySelector('#pool').value === 0")
        assert text(tab, "#requests") == "1"
        assert int(text(tab, "#output")) == len(whole) + 2, (
            "one for each byte, and the two control tokens that are not shown"
        )
        ask(tab, "more")
        tab.until(f"document.querySelectorAll('.cost').length === 2 && {IDLE}")
        assert turns(tab)[2:] == ["more", whole], "what was said before goes with the next turn"
        assert tab.complaints == []


def test_markup_in_a_question_and_in_its_answer_is_shown_as_it_is(tab: Tab) -> None:
    with served(served_model_names=("<i>mine</i>",)) as server:
        tab.open(f"{server.url}/")
        ask(tab, EVIL)
        tab.until(f"document.querySelector('.cost') && {IDLE}")
        assert turns(tab) == [EVIL, f"user\n{EVIL}"]
        assert text(tab, "strong") == "<i>mine</i>"
        assert tab.evaluate("document.querySelectorAll('main img, main b, main script, header i').length") == 0
        assert tab.evaluate("document.title") == "octavo serves <i>mine</i>"
        assert tab.complaints == []


def test_stop_ends_the_request_and_a_new_chat_forgets_it(tab: Tab) -> None:
    core = make_core(Slow(0.02))
    with served(core) as server:
        tab.open(f"{server.url}/")
        ask(tab, "a" * 400)
        tab.until("document.querySelector('.assistant').textContent.length > 8")
        tab.evaluate("document.querySelector('#stop').click()")
        server.until_empty()
        tab.until(IDLE)
        assert len(turns(tab)[1]) < 400
        ask(tab, "b" * 400)
        tab.until("document.querySelectorAll('.assistant')[1].textContent.length > 8")
        tab.evaluate("document.querySelector('#clear').click()")
        server.until_empty()
        tab.until(IDLE)
        assert turns(tab) == []
        ask(tab, "c")
        tab.until(f"document.querySelector('.cost') && {IDLE}")
        assert turns(tab) == ["c", "user\nc"]
        assert tab.complaints == []


def test_a_refusal_is_shown_in_its_words(tab: Tab) -> None:
    with served() as server:
        tab.open(f"{server.url}/")
        ask(tab, "a" * 3000)
        tab.until("document.querySelector('.error')")
        assert "the context holds 2048" in text(tab, ".error")
        tab.until(IDLE)
        ask(tab, "b")
        tab.until(f"document.querySelector('.cost') && {IDLE}")
        assert turns(tab)[-1] == "user\nb", "what was refused is not said again"
        assert [one for one in tab.complaints if "400" not in one] == []


def test_a_server_with_keys_asks_for_one(tab: Tab) -> None:
    with served(api_keys=("secret",)) as server:
        tab.open(f"{server.url}/")
        tab.until("document.querySelector('#state').textContent === 'needs a key'")
        tab.type("#key", "secret")
        tab.until("document.querySelector('#state').textContent === 'ready'", PATIENCE_S)
        ask(tab, "hi")
        tab.until(f"document.querySelector('.cost') && {IDLE}")
        assert turns(tab) == ["hi", "user\nhi"]
        assert [one for one in tab.complaints if "401" not in one] == []


def test_without_a_chat_template_and_behind_a_path_it_completes(tab: Tab) -> None:
    with served(tokenizer=byte_tokenizer(None)) as server:
        tab.resize(360, 700)
        tab.open(f"{server.url}/")
        tab.evaluate("document.querySelector('#limit').value = 7")
        ask(tab, "abc")
        tab.until(f"document.querySelector('.cost') && {IDLE}")
        assert turns(tab) == ["abc", "abcabca"]
        wide = tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not wide, "a narrow window needs no scrolling to the side"
        assert tab.complaints == []


def test_what_is_kept_found_again_and_pinned_is_shown_where_there_is_any(tab: Tab) -> None:
    with served(make_core(policies=Policies.named(reuse="prefix"))) as server:
        tab.open(f"{server.url}/")
        tab.until("document.querySelector('#state').textContent === 'ready'")
        assert text(tab, "#tiers") == ""
        body = {"prompt": "the same words, said twice over and over", "max_tokens": 2}
        for _ in range(2):
            server.post("/v1/completions", body)
        server.post("/v1/cache/pin", {"prompt": body["prompt"], "ttl": 60})
        tab.until("document.querySelector('#tiers').textContent.includes('positions looked up')")
        tab.until("document.querySelector('[data-tier=pins]') !== null")
        assert tab.evaluate("document.querySelector('[data-tier=reused] meter').value") > 0
        assert not tab.complaints
