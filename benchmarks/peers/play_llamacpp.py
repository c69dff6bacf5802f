"""llama.cpp's own server, built from the tree inside the llama-cpp-python source distribution.

One server for each workload, with as many slots as it has requests and room for the longest in each;
starting it is not timed. All requests are posted at once, one connection each, not streamed: a request's
first token is placed by the server's own timings. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Job, Played, Setup, flag

CACHE_TYPES = {"fp32": "f32", "bf16": "bf16", "int8": "f16"}
READY_TIMEOUT_S = 120.0
ROUND = 256
"""Positions of a slot are rounded up to this by the server."""


class Player:
    """Options: `reuse` (prompt cache, slots by common prefix), `batch` and `ubatch` (logical and physical tokens)."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._server: subprocess.Popen[bytes] | None = None
        self._shape = (0, 0)
        self._port = 0
        self._reuse = flag(setup.options, "reuse")
        self._command = [
            setup.tools["server"], "-m", setup.checkpoint, "-t", str(setup.threads), "-tb", str(setup.threads),
            "-fa", "on", "-b", str(setup.options.get("batch", 2048)), "-ub", str(setup.options.get("ubatch", 512)),
            "-ctk", CACHE_TYPES[setup.dtype], "-ctv", CACHE_TYPES[setup.dtype],
            "-ngl", "0", "--host", "127.0.0.1", "--no-warmup",
        ]  # fmt: skip
        version = subprocess.run([setup.tools["server"], "--version"], capture_output=True, text=True, check=True)
        told = (version.stderr + version.stdout).strip().splitlines()
        self.settings = {
            "version": next((line for line in told if line.startswith("version")), told[0] if told else "unknown"),
            "command": " ".join(self._command[3:]),
            "cache_prompt": self._reuse,
        }
        self._serve(1, 512)

    def prepare(self, jobs: list[Job]) -> None:
        self._serve(len(jobs), max(len(job.prompt) + job.max_tokens for job in jobs))

    def play(self, jobs: list[Job]) -> Played:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(jobs)) as posts:
            answers = list(posts.map(lambda job: self._post(job, start), jobs))
        seconds = time.perf_counter() - start
        return Played(
            seconds=seconds,
            outputs=[answer["tokens"] for answer, _ in answers],
            first_s=[last - answer["timings"]["predicted_ms"] / 1e3 for answer, last in answers],
            last_s=[last for _, last in answers],
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)
            self._server = None

    def _serve(self, slots: int, longest: int) -> None:
        """A server of this shape, unless it is the one that runs."""
        shape = (slots, -(-longest // ROUND) * ROUND)
        if shape == self._shape:
            return
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        words = [*self._command, "--port", str(self._port), "-np", str(slots), "-c", str(slots * shape[1])]
        self._server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready():
            if self._server.poll() is not None:
                raise SystemExit(f"the server ended with {self._server.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit("the server was not ready in time")
            time.sleep(0.05)
        self._shape = shape

    def _ready(self) -> bool:
        try:
            asking = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            asking.request("GET", "/health")
            return asking.getresponse().status == 200
        except OSError:
            return False

    def _post(self, job: Job, start: float) -> tuple[dict[str, Any], float]:
        body = {
            "prompt": job.prompt, "n_predict": job.max_tokens, "ignore_eos": True, "return_tokens": True,
            "temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "cache_prompt": self._reuse, "stream": False,
        }  # fmt: skip
        asking = http.client.HTTPConnection("127.0.0.1", self._port)
        asking.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = asking.getresponse()
        text = answer.read()
        last = time.perf_counter() - start
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {text[:300]!r}")
        return json.loads(text), last
