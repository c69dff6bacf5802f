"""What HTTP costs: `octavo serve` under concurrent streams beside the same engine without a server.

    offline   LLM.generate, all prompts at once, in a process of its own
    served    octavo serve in a process of its own; every prompt is one streamed completion

The same prompts, lengths, seeds and settings; repetitions in turn, so that a machine that drifts
drifts for both. The client is a plain socket reader in this process: it shares the cores with the
server, as a client on the same machine does. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from machine_facts import described, machine_facts

_OFFLINE = """
import json, sys, time
from octavo import LLM, SamplingParams
asked = json.loads(sys.stdin.readline())
llm = LLM(asked["model"], **asked["options"])
params = SamplingParams(temperature=0, max_tokens=asked["output"], ignore_eos=True)
llm.generate(asked["prompts"][:2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
print("ready", flush=True)
for line in sys.stdin:
    begun = time.monotonic()
    outputs = llm.generate(asked["prompts"], params)
    seconds = time.monotonic() - begun
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"seconds": seconds, "tokens": sum(map(len, tokens))}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Asked:
    model: str | None
    prompts: list[list[int]]
    output: int
    options: dict[str, int]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="as for octavo serve (default: the embedded model)")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams (default 32)")
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each, in turn (default 3)")
    options = parser.parse_args(arguments)
    if min(options.streams, options.input, options.output, options.repeat) < 1:
        parser.error("--streams, --input, --output and --repeat must be at least 1")
    random = Random(7)
    prompts = [[random.randrange(1000, 20000) for _ in range(options.input)] for _ in range(options.streams)]
    asked = Asked(options.model, prompts, options.output, {"kv_cache_memory_bytes": 512 << 20})
    facts = machine_facts()
    offline, served = measure(asked, options.repeat)
    report(asked, facts, offline, served)


def measure(asked: Asked, repeat: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each repetition, (offline, served), taken in turn."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    offline_rates: list[float] = []
    served_rates: list[float] = []
    with Started(_offline(asked, environment)) as offline, Started(_server(asked, environment)) as server:
        port = _port(server)
        _line(offline, "ready")
        asyncio.run(_streams(port, Asked(asked.model, asked.prompts[:2], 2, asked.options)))
        for _ in range(repeat):
            offline_rates.append(_offline_rate(offline))
            served_rates.append(asyncio.run(_streams(port, asked)))
    return offline_rates, served_rates


class Started:
    """A process that is ended at the end of its block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *exc_info: object) -> None:
        self.process.terminate()
        self.process.wait(30)


def _offline(asked: Asked, environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OFFLINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    told = {"model": asked.model, "prompts": asked.prompts, "output": asked.output, "options": asked.options}
    assert process.stdin is not None
    process.stdin.write(json.dumps(told) + "\n")
    process.stdin.flush()
    return process


def _offline_rate(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    answer = json.loads(_line(process, "{"))
    return float(answer["tokens"]) / float(answer["seconds"])


def _server(asked: Asked, environment: dict[str, str]) -> subprocess.Popen[str]:
    model = [asked.model] if asked.model else []
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.options.items()]
    command = [sys.executable, "-m", "octavo", "serve", *model, "--port=0", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _port(server: subprocess.Popen[str]) -> int:
    """The port from the line that says where the server answers."""
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found:
            return int(found[1])
    raise SystemExit("the server ended before it was ready")


def _line(process: subprocess.Popen[str], prefix: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return line
    raise SystemExit("the offline engine ended early")


async def _streams(port: int, asked: Asked) -> float:
    """All prompts at once, each a stream read to its end; tokens per second over all."""
    begun = time.monotonic()
    tokens = await asyncio.gather(*[_stream(port, prompt, asked.output) for prompt in asked.prompts])
    return sum(tokens) / (time.monotonic() - begun)


async def _stream(port: int, prompt: list[int], output: int) -> int:
    body = json.dumps(
        {
            "model": "",
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).replace('"model": "", ', "")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write((head + "Connection: close\r\n\r\n" + body).encode())
    await writer.drain()
    text = (await reader.read()).decode()
    writer.close()
    counted = re.findall(r'"completion_tokens": ?(\d+)', text)
    if not counted:
        raise SystemExit(f"the server answered: {text[:500]}")
    return int(counted[-1])


def report(asked: Asked, facts: dict[str, object], offline: list[float], served: list[float]) -> None:
    ratios = [s / o for s, o in zip(served, offline, strict=True)]
    print(f"{len(asked.prompts)} streams, {len(asked.prompts[0])} tokens in, {asked.output} out; output tokens/s")
    print(f"{'':10} {'median':>8} {'least':>8} {'most':>8}")
    for name, values in (("offline", offline), ("served", served), ("ratio", ratios)):
        print(f"{name:10} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}")
    print(described(facts))
    figures = {"offline": offline, "served": served, "ratio_median": statistics.median(ratios)}
    print(json.dumps({"benchmark": "serve", "machine": facts, "streams": len(asked.prompts)} | figures))


if __name__ == "__main__":
    main()
