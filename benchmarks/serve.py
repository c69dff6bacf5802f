"""What HTTP costs: `octavo serve` under concurrent streams beside the same engine without a server.

    offline   LLM.generate, all prompts at once, in a process of its own
    served    octavo serve in a process of its own; every prompt is one streamed completion

The same prompts, lengths, seeds and settings; repetitions in turn, so that a machine that drifts
drifts for both. The client is a plain socket reader in this process: it shares the cores with the
server, as a client on the same machine does. On a machine that is busy with other things only `--threads 1`
and the processor time of each process say anything. Prints a table, then one JSON line.

    python benchmarks/serve.py --dtype bf16
    python benchmarks/serve.py --threads 1 --output 32
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    options: dict[str, int | str]


@dataclass(slots=True)
class Taken:
    """One side's repetitions."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us_per_token: list[float] = field(default_factory=list)
    """Of its process, all threads."""


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "auto": "auto"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="as for octavo serve (default: the embedded model)")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams (default 32)")
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each, in turn (default 3)")
    parser.add_argument("--threads", type=int, help="of each engine (default: its own choice)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="auto", help="of the model (default: its own)")
    parser.add_argument("--minutes", type=float, default=5.0, help="no repetition begins after them (default 5)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of octavo's configuration, by name"
    )
    options = parser.parse_args(arguments)
    if min(options.streams, options.input, options.output, options.repeat) < 1:
        parser.error("--streams, --input, --output and --repeat must be at least 1")
    random = Random(7)
    prompts = [[random.randrange(1000, 20000) for _ in range(options.input)] for _ in range(options.streams)]
    chosen: dict[str, int | str] = {"kv_cache_memory_bytes": 512 << 20, "dtype": DTYPES[options.dtype]}
    if options.threads:
        chosen["threads"] = options.threads
    for text in options.option:
        name, _, value = text.partition("=")
        chosen[name] = int(value) if value.isdecimal() else value
    asked = Asked(options.model, prompts, options.output, chosen)
    facts = machine_facts()
    offline, served = measure(asked, options.repeat, 60 * options.minutes)
    report(asked, facts, offline, served)


def measure(asked: Asked, repeat: int, limit_s: float) -> tuple[Taken, Taken]:
    """(offline, served), in turn."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    offline, served = Taken(), Taken()
    begun = time.monotonic()
    with Started(_offline(asked, environment)) as engine, Started(_server(asked, environment)) as server:
        port = port_of(server)
        _line(engine, "ready")
        asyncio.run(streams(port, Asked(asked.model, asked.prompts[:2], 2, asked.options)))
        for number in range(repeat):
            if number and time.monotonic() - begun > limit_s:
                break
            for side, process in ((offline, engine), (served, server)):
                before = cpu_seconds(process.pid)
                rate = _offline_rate(engine) if side is offline else asyncio.run(streams(port, asked))
                spent = cpu_seconds(process.pid) - before
                side.tokens_per_s.append(rate)
                side.cpu_us_per_token.append(1e6 * spent / (len(asked.prompts) * asked.output))
    return offline, served


def cpu_seconds(pid: int) -> float:
    """Of all its threads, those that have ended included; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


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


def port_of(server: subprocess.Popen[str]) -> int:
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


async def streams(port: int, asked: Asked) -> float:
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


def report(asked: Asked, facts: dict[str, object], offline: Taken, served: Taken) -> None:
    ratios = [s / o for s, o in zip(served.tokens_per_s, offline.tokens_per_s, strict=True)]
    extra = [s - o for s, o in zip(served.cpu_us_per_token, offline.cpu_us_per_token, strict=True)]
    print(f"{len(asked.prompts)} streams, {len(asked.prompts[0])} tokens in, {asked.output} out, {asked.options}")
    print(f"{'':22} {'median':>8} {'least':>8} {'most':>8}")
    for name, values in (
        ("offline, tokens/s", offline.tokens_per_s),
        ("served, tokens/s", served.tokens_per_s),
        ("ratio", ratios),
        ("offline, CPU us/token", offline.cpu_us_per_token),
        ("served, CPU us/token", served.cpu_us_per_token),
        ("more CPU us/token", extra),
    ):
        print(f"{name:22} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}")
    print(described(facts))
    figures = {
        "offline": offline.tokens_per_s,
        "served": served.tokens_per_s,
        "ratio_median": statistics.median(ratios),
        "offline_cpu_us_per_token": offline.cpu_us_per_token,
        "served_cpu_us_per_token": served.cpu_us_per_token,
    }
    shape = {"streams": len(asked.prompts), "input": len(asked.prompts[0]), "output": asked.output}
    print(json.dumps({"benchmark": "serve", "machine": facts, "options": asked.options} | shape | figures))


if __name__ == "__main__":
    main()
