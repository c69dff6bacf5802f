"""`octavo serve` as a process: its flags, its readiness, its signals, a small real model behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.torch.checkpoints import tiny_llama

from octavo.cli.main import run

ROOT = Path(__file__).parents[2]
STARTS_S = 90.0
LONG = {"prompt": "hello world", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with room for long answers."""
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, hidden_size=64)


@dataclass
class Process:
    child: subprocess.Popen[str]
    url: str
    printed: list[str]
    reader: threading.Thread

    def ends(self, within_s: float = 60.0) -> int:
        code = self.child.wait(within_s)
        self.reader.join(within_s)
        return code

    @property
    def text(self) -> str:
        return "".join(self.printed)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo.cli.main", "serve", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", **more}


@contextmanager
def started(*arguments: str, **more: str) -> Iterator[Process]:
    child = subprocess.Popen(
        command("--port", "0", *arguments), stderr=subprocess.PIPE, text=True, env=environment(**more), cwd="/"
    )
    printed: list[str] = []
    ready = threading.Event()

    def read() -> None:
        for line in child.stderr or ():
            printed.append(line)
            if line.startswith("ready: "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(STARTS_S), "".join(printed)
        found = re.search(r"^ready: (\S+) serves", "".join(printed), flags=re.MULTILINE)
        assert found, "".join(printed)
        yield Process(child, found[1], printed, reader)
    finally:
        child.kill()
        child.wait()
        reader.join()
        if child.stderr:
            child.stderr.close()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that cannot work says, on one line; it ends with 2."""
    capsys.readouterr()
    assert run(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_it_answers_as_soon_as_it_is_ready_and_drains_on_sigterm(model: Path) -> None:
    with started(str(model), "--served-model-name", "tiny", "--max-model-len", "1024") as server:
        # What it prints is what one types.
        curl = next(line for line in server.printed if line.startswith("  curl ") or "curl " in line)
        url, body = re.search(r"curl (\S+) .*-d '(.*)'", curl).groups()  # type: ignore[union-attr]
        answer = httpx.post(url, json=json.loads(body), timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "tiny"
        assert "max_model_len" in server.text
        assert "1,024" in server.text
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 1024)

        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.child.send_signal(signal.SIGTERM)
            end = time.monotonic() + 30
            while httpx.get(f"{server.url}/ready").status_code != 503:
                assert time.monotonic() < end
            late = httpx.post(f"{server.url}/v1/completions", json=LONG)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.ends() == 0
        assert "SIGTERM: 1 to finish" in server.text
        logged = [json.loads(line) for line in server.printed if line.startswith("{")]
        assert [line["path"] for line in logged] == [url.removeprefix(server.url), "/v1/completions"]
        assert logged[-1]["records"][0]["output_tokens"] == 400


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_key_is_taken_from_the_environment_and_a_second_signal_ends_all_at_once(
    model: Path, number: signal.Signals
) -> None:
    with started("--model", str(model), "--host", "0.0.0.0", OCTAVO_API_KEY="of-the-environment") as server:
        right = {"Authorization": "Bearer of-the-environment"}
        assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 401
        assert "of-the-environment" not in server.text
        assert "everybody" not in server.text
        long = LONG | {"max_tokens": 1900, "stream": True, "n": 4}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, headers=right, timeout=60) as stream:
            next(stream.iter_lines())
            server.child.send_signal(number)
            end = time.monotonic() + 30
            while number.name not in server.text:
                assert time.monotonic() < end
                time.sleep(0.01)
            begun = time.monotonic()
            server.child.send_signal(number)
            assert server.ends() == 128 + number
            assert time.monotonic() - begun < 2


def test_an_open_address_is_warned_of_unless_it_asks_for_a_key(model: Path) -> None:
    with started(str(model), "--host", "0.0.0.0", "--shutdown-timeout", "0.2") as server:
        assert "everybody who reaches 0.0.0.0" in server.text
        long = LONG | {"max_tokens": 1900, "stream": True, "n": 16}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60) as stream:
            next(stream.iter_lines())
            begun = time.monotonic()
            server.child.send_signal(signal.SIGTERM)
            assert server.ends() == 0, "a drain that is bounded ends"
            assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--port", "99999"), "port=99999"),
        (("--port", "x"), "port"),
        (("--host", "nowhere.invalid"), "host='nowhere.invalid'"),
        (("--max-body-bytes", "0"), "max_body_bytes=0"),
        (("--max-waiting-requests", "0"), "max_waiting_requests=0"),
        (("--send-timeout", "0"), "send_timeout=0"),
        (("--shutdown-timeout", "nan"), "shutdown_timeout=nan"),
        (("--root-path", "octavo"), "root_path='octavo'"),
        (("--api-key", ""), "api_key"),
        (("--chat-template", "/nowhere.jinja"), "chat_template='/nowhere.jinja'"),
        (("--tensor-parallel-size", "2"), "one device per engine"),
        (("--block-size", "0"), "block_size=0"),
        (("--max-tokens", "5"), "no such option"),
        (("one", "--model", "two"), "name the model once"),
        (("/nowhere/at/all",), "model='/nowhere/at/all'"),
    ],
)
def test_a_wrong_flag_is_named_on_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(capsys, *(arguments if "--port" in arguments else ("--port", "0", *arguments)))


def test_an_address_of_another_machine_is_told_as_the_hosts_fault(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--host", "192.0.2.1", "--port", "0", "--model", "/nowhere")
    assert "192.0.2.1: is no address of this machine" in said.replace("'", "")
    assert "port" not in said


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "--port", str(port), "--model", "/nowhere")
        assert f"port={port}" in said
        assert "in use" in said
        assert "--port" in said
