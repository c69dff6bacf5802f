"""`octavo chat` with a tiny model: at a terminal, driven as by a person, and from a pipe."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TEMPLATE, tiny_llama, tiny_tokenizer
from terminal import CTRL_C, CTRL_D, Terminal

from octavo import LLM, SamplingParams
from octavo.cli.main import run
from octavo.runtime.executor import TorchExecutor

SOURCE = str(Path(__file__).parents[2] / "src")
OPTIONS = ["--dtype", "float32", "--max-kv-tokens", "1024", "--temperature", "0"]
SYSTEM_TEMPLATE = TEMPLATE.replace("['user', 'assistant']", "['system', 'user', 'assistant']")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"vocab_size": 300, "max_position_embeddings": 512, "initializer_range": 0.3}
    path = tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=False, **shape)
    tiny_tokenizer(SYSTEM_TEMPLATE, vocab_size=300).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, dtype="float32")


Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    """Run a chat whose stdin is these lines; returns the exit code, stdout and stderr."""

    def talk(*lines: str, options: tuple[str, ...] = ("--max-tokens", "8")) -> tuple[int, str, str]:
        raw = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = run(["chat", "--model", model, *OPTIONS, *options])
        return code, *capsys.readouterr()

    return talk


def said(llm: LLM, *turns: str, system: str | None = None, max_tokens: int = 8) -> str:
    """What the engine alone answers to turns of user, assistant, user..."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat(messages, SamplingParams(max_tokens=max_tokens, temperature=0))[0].outputs[0].text


# -- from a pipe ------------------------------------------------------------------------------------


def test_each_line_is_a_message_and_stdout_has_the_answers_alone(piped: Piped, llm: LLM) -> None:
    code, out, err = piped("hello", "world", "hello world")
    first = said(llm, "hello")
    second = said(llm, "hello", first, "world")
    third = said(llm, "hello", first, "world", second, "hello world")
    assert first != second, "the history makes no difference"
    assert out == "".join(f"{answer}\n" for answer in (first, second, third))
    assert code == 0
    assert "\x1b" not in out + err
    costs = re.findall(
        r"^\d+ tokens(?: \(cut\))?, [\d.]+ tokens/s, TTFT .*, KV \d+/64 blocks, context (\d+)/512$", err, re.MULTILINE
    )
    assert len(costs) == 3
    assert [int(cost) for cost in costs] == sorted(int(cost) for cost in costs)


def test_quiet_says_nothing_but_the_answers(piped: Piped) -> None:
    _, out, err = piped("hello", options=("--max-tokens", "8", "--quiet"))
    assert out
    assert err == ""


def test_the_start_table_is_short(piped: Piped) -> None:
    _, _, err = piped(options=())
    assert "octavo" in err.splitlines()[0]
    # A reason that wraps goes on in a line that begins with blanks.
    assert [line.split()[0] for line in err.splitlines()[1:] if line[:1].strip()][:5] == [
        "device",
        "geometry",
        "KV",
        "blocks",
        "max_model_len",
    ]
    assert len(err.splitlines()) < 12


def test_a_system_message_holds_and_can_be_changed_and_left_out(piped: Piped, llm: LLM) -> None:
    _, out, _ = piped("hello", "/clear", "/system again again", "hello", "/clear", "/system none", "hello",
                      options=("--system", "world world world", "--max-tokens", "8"))  # fmt: skip
    wanted = [
        said(llm, "hello", system="world world world"),
        said(llm, "hello", system="again again"),
        said(llm, "hello"),
    ]
    assert len(set(wanted)) == 3, "the system message makes no difference"
    assert out == "".join(f"{answer}\n" for answer in wanted)


def test_undo_and_retry_and_a_new_chat_forget(piped: Piped, llm: LLM) -> None:
    _, out, err = piped("hello", "world", "/undo", "/retry", "/new", "world")
    first = said(llm, "hello")
    assert out.splitlines() == [first, said(llm, "hello", first, "world"), first, said(llm, "world")]
    assert "taken back: world (2 messages are left)" in err
    assert "the same answer is to be expected" in err


def test_a_retry_that_cannot_be_answered_forgets_nothing(piped: Piped, llm: LLM) -> None:
    _, out, err = piped("hello", f"/system {'again ' * 600}", "/retry", "/system none", "world")
    first = said(llm, "hello")
    assert "no longer fits" in err
    assert out.splitlines() == [first, said(llm, "hello", first, "world")]


def test_what_is_set_holds_for_the_next_answer(piped: Piped, llm: LLM) -> None:
    _, out, err = piped("/set max_tokens 3", "hello", "/set max_tokens", "/set temperature default", "/set temperature")
    assert out == said(llm, "hello", max_tokens=3) + "\n"
    assert "max_tokens = 3 (asked)" in err
    assert "temperature = 1.0 (the default)" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/hlep", "did you mean /help?"),
        ("/zzzzzz", "/help lists them"),
        ("/set temperature hot", "temperature='hot': use 0 for greedy"),
        ("/set temperature -1", "temperature=-1.0: use 0 for greedy"),
        ("/set n 2", "octavo generate"),
        ("/set nothing 2", "is no parameter of sampling"),
        ("/set top_p 0", "top_p=0.0"),
        ("/undo", "nothing has been said"),
        ("/retry", "there is no message to answer"),
        ("/tables", "there is no sequence to show"),
        ("/save", "needs a file: /save FILE"),
        ("/load", "needs a file: /load FILE"),
        ("/load none.json", "cannot be read"),
        ("/load \0", "is no file name"),
        ("\udcff", "line 1 is not UTF-8"),
        ('"""', "was never ended"),
    ],
)
def test_what_cannot_be_done_is_told_and_the_chat_goes_on(piped: Piped, llm: LLM, line: str, told: str) -> None:
    ends_input = line == '"""'
    code, out, err = piped(line, *([] if ends_input else ["hello"]), options=("--max-tokens", "8", "--quiet"))
    assert told in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ("" if ends_input else said(llm, "hello") + "\n")
    assert code == 1


def test_a_chat_is_saved_and_goes_on_in_another(piped: Piped, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    _, out, err = piped("hello", f"/save {path}", f"/save {path}", options=("--max-tokens", "8", "--system", "again"))
    assert json.loads(path.read_text())["messages"] == [
        {"role": "system", "content": "again"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": out[:-1]},
    ]  # fmt: skip
    assert err.count("3 messages saved") == 2
    _, later, err = piped(f"/load {path}", "world")
    assert "2 messages loaded, with a system message" in err
    assert later == said(llm, "hello", out[:-1], "world", system="again") + "\n"


def test_saving_never_writes_over_a_file_of_somebody_else(piped: Piped, tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    path.write_text("dear diary")
    code, _, err = piped("hello", f"/save {path}")
    assert code == 1
    assert "exists; name another file" in err
    assert path.read_text() == "dear diary"


def test_a_saved_chat_that_the_template_refuses_changes_nothing(piped: Piped, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "wizard", "content": "x"}, {"role": "user", "content": "x"}]')
    code, out, err = piped("hello", f"/load {path}", "world")
    first = said(llm, "hello")
    assert "role wizard is not served" in err
    assert out == f"{first}\n{said(llm, 'hello', first, 'world')}\n"
    assert code == 1


def test_stats_and_tables_tell_what_the_last_answer_cost(piped: Piped) -> None:
    _, _, err = piped("hello world", "hello " * 20, "/stats", "/tables")
    assert "answers          2, 16 tokens" in err
    assert "KV cache         0/64 blocks in use" in err
    fields = dict(re.findall(r"^  (\w+) +(.*)$", err, re.MULTILINE))
    assert fields["output_tokens"] == "8"
    assert fields["cache_dtype"] == "fp32"
    table = re.search(r"^  full: (.*)$", err, re.MULTILINE)
    assert table is not None
    blocks = [re.fullmatch(r"A(\d+) -> \d+ (ready|filling)", part) for part in table[1].split(", ")]
    assert [int(block[1]) for block in blocks if block] == list(range(len(blocks)))
    last = int(fields["input_tokens"]) + 8
    assert (len(blocks) - 1) * 16 < last <= len(blocks) * 16 + 1


def test_a_history_that_outgrows_the_context_is_told_with_the_way_out(piped: Piped) -> None:
    lines = ["hello " * 100] * 8
    code, out, err = piped(*lines, "/undo", "/clear", "hello")
    assert "no longer fits: a conversation has at most 512 tokens" in err
    assert "/undo takes back the last exchange, /clear begins anew" in err
    assert code == 1
    answered = 8 - err.count("no longer fits")
    assert 3 <= answered <= 5
    assert len(out.splitlines()) == answered + 1


def test_a_message_longer_than_the_whole_pool_is_told_and_the_next_one_answered(piped: Piped) -> None:
    options = ("--max-tokens", "8", "--num-gpu-blocks-override", "4")
    _, out, err = piped("hello " * 100, "hello", options=options)
    assert re.search(r"at most 64 tokens \(.*the pool.*\); /undo", err)
    assert len(out.splitlines()) == 1


def test_an_answer_ends_where_the_context_does(piped: Piped) -> None:
    options = ("--max-tokens", "100000", "--ignore-eos", "--max-model-len", "40", "--min-tokens", "90")
    code, _, err = piped("hello", options=options)
    assert code == 0
    assert "context 40/40" in err
    assert "the context is full" in err


def test_an_engine_that_fails_ends_the_chat_with_the_reason(
    piped: Piped, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from octavo.cli import chat

    collect, loaded = TorchExecutor.collect, chat._session

    def failing(executor: TorchExecutor) -> Any:
        raise RuntimeError("out of memory")

    def session(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(TorchExecutor, "collect", failing)
        return loaded(*given, **more)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "_session", session)
    code, out, err = piped("hello", "world")
    monkeypatch.setattr(TorchExecutor, "collect", collect)
    assert code == 1
    assert out == ""
    assert err.count("error: the engine failed: RuntimeError: out of memory") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--n", "2"), "n=2: a chat has one answer"),
        (("--logprobs", "1"), "logprobs=1"),
        (("--top-p", "0"), "top_p"),
        (("--block-size", "0"), "block_size=0"),
        (("--skip-tokenizer-init",), "a chat needs a tokenizer"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    piped: Piped, options: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.build.build_engine", None)
    code, out, err = piped("hello", options=options)
    assert (code, out) == (2, "")
    assert told in err


def test_a_model_without_a_template_or_with_one_that_refuses_system_messages_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_llama(tmp_path / "plain")
    assert run(["chat", "--model", str(path), "--system", "be brief"]) == 2
    assert "role system is not served" in capsys.readouterr().err
    tiny_tokenizer(None).save_pretrained(path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    assert run(["chat", "--model", str(path)]) == 2
    assert "this model has no chat template; use octavo generate" in capsys.readouterr().err


# -- at a terminal ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def terminal(model: str) -> Iterator[Terminal]:
    """One chat for all the tests below: each leaves it at an empty line."""
    env = {**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "octavo", "chat", "--model", model, *OPTIONS, "--ignore-eos"]
    opened = Terminal([*command, "--no-skip-special-tokens", "--max-tokens", "30"], env)
    try:
        opened.until("Ctrl-D leaves", 120)
        opened.until("> ")
        yield opened
    finally:
        opened.close()


def ask(terminal: Terminal, line: str, until: str = "> ") -> str:
    terminal.type(f"{line}\n")
    terminal.until(line)
    return terminal.until(f"\n{until}")


def test_an_answer_appears_token_by_token(terminal: Terminal) -> None:
    before = len(terminal.pieces)
    shown = ask(terminal, "hello world")
    assert "30 tokens (cut), " in shown
    assert "tokens/s, TTFT " in shown
    assert len(terminal.pieces) - before >= 10, "the answer came in one piece"


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(terminal: Terminal, tmp_path: Path) -> None:
    ask(terminal, "/clear")
    ask(terminal, "/set max_tokens 480")
    terminal.type("hello again\n")
    terminal.until("hello again\n")
    seen = len(terminal.text)
    while len(terminal.text) < seen + 30:
        terminal._receive(10)
    terminal.type(CTRL_C)
    shown = terminal.until("\n> ")
    assert "(stopped), " in shown
    tokens = int(re.search(r"(\d+) tokens \(stopped\)", shown)[1])  # type: ignore[index]
    assert 0 < tokens < 480
    ask(terminal, f"/save {tmp_path / 'chat.json'}")
    user, assistant = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert user == {"role": "user", "content": "hello again"}
    assert assistant["content"].strip()
    assert "KV cache         0/64 blocks in use" in ask(terminal, "/stats")
    ask(terminal, "/set max_tokens 30")
    assert "tokens (cut)" in ask(terminal, "world")


def test_ctrl_c_at_an_empty_line_leaves_nothing(terminal: Terminal) -> None:
    terminal.type("half a mess")
    terminal.until("half a mess")
    time.sleep(0.2)  # a signal that comes before readline waits for keys is seen with the next key
    terminal.type(CTRL_C)
    assert "Ctrl-D or /quit leaves" in terminal.until("> ")
    assert "tokens (cut)" in ask(terminal, "hello")


def test_lines_are_edited_and_remembered(terminal: Terminal) -> None:
    ask(terminal, "/clear")
    terminal.type("hello wrold\x7f\x7f\x7f\x7forld\n")
    terminal.until("tokens (cut)")
    terminal.until("\n> ")
    assert "taken back: hello world (0 messages" in ask(terminal, "/undo")
    terminal.type("\x1b[A\x1b[A\n")  # twice up: the message before /undo
    terminal.until("tokens (cut)")
    terminal.until("\n> ")
    assert "taken back: hello world (0 messages" in ask(terminal, "/undo")


def test_a_message_of_several_lines_is_one(terminal: Terminal) -> None:
    ask(terminal, "/clear")
    terminal.type('"""\n')
    terminal.until("| ")
    terminal.type("/quit\n")
    terminal.until("| ")
    terminal.type('world"""\n')
    terminal.until("\n> ")
    assert "taken back: /quit\nworld" in ask(terminal, "/undo")


def test_the_end_of_input_inside_a_block_forgets_the_block_and_stays(terminal: Terminal) -> None:
    terminal.type('"""\n')
    terminal.until("| ")
    terminal.type(CTRL_D)
    assert "was never ended; nothing was sent" in terminal.until("\n> ")
    assert "tokens (cut)" in ask(terminal, "hello")


def test_help_lists_every_command_and_tab_completes_one(terminal: Terminal) -> None:
    shown = ask(terminal, "/help")
    for name in ("/clear", "/system", "/undo", "/retry", "/save", "/load", "/set", "/stats", "/tables", "/quit"):
        assert f"\n{name} " in shown
    terminal.type("/tab\t\n")
    assert "full: A0 -> " in terminal.until("\n> ")


def test_ctrl_d_leaves_and_nothing_is_left_of_the_colours(terminal: Terminal) -> None:
    """The last one: it ends the chat."""
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
