"""Everything in the table of targets, in one command or in parts: what was asked, what was reached, whether it is met.

A section runs one or two of the other benchmarks, octavo and peers side by side in one run, within minutes. What a
section gave is kept in `--results`, so that the table can be filled in several sittings; `--again` runs anew what
is there. Prints the table after every section, and one JSON line in the end.

    python benchmarks/targets.py --list
    python benchmarks/targets.py --only scheduler,ready,serve,outside
    python benchmarks/targets.py --only W2-bf16,W2-fp32 --again
    python benchmarks/targets.py --show

Peers need their environments: `python benchmarks/peers/run.py --make-only --dtype fp32,bf16,int8` makes them once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from environments import RECIPES
from machine_facts import described, machine_facts
from run import default_cache
from target_figures import (
    Report,
    Target,
    bandwidth_target,
    outside_targets,
    peak_target,
    peers_targets,
    ready_targets,
    scheduler_targets,
    serve_target,
    table,
)

HERE = Path(__file__).resolve().parent
OFF, ON = False, True


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    minutes: float
    """About, on two cores; a benchmark that takes twice as long is ended."""
    commands: tuple[tuple[str, ...], ...]
    """Scripts with their arguments; the last line that each prints is JSON."""
    read: Callable[[Sequence[Report]], list[Target]]


def peers(
    name: str, dtype: str, workloads: str, engines: str, asked: Sequence[tuple[Any, ...]], minutes: float
) -> Section:
    command = ("peers/run.py", "--dtype", dtype, "--workloads", workloads, "--engines", engines)
    command += ("--minutes", f"{2 * minutes:g}", "--cache", "{cache}", "--repeat", "{repeat}")
    lines = [(dtype, *one) for one in asked]
    return Section(name, minutes, (command,), lambda reports: peers_targets(name, reports, lines))


def limited(dtype: str) -> tuple[str, ...]:
    return ("limits.py", "--dtype", dtype, "--batches", "1", "--steps", "48", "--prefill", "256", "--repeat", "1")


def prompts(dtype: str, engines: str, gate: float | None, minutes: float) -> Section:
    """W3 beside the machine's peak and, where a gate asks for it, beside peers."""
    name = f"W3-{dtype}"
    section = peers(name, dtype, "W3", engines, () if gate is None else (("W3", OFF, gate, None),), minutes)

    def read(reports: Sequence[Report]) -> list[Target]:
        return [*section.read(reports), peak_target(name, reports[0], reports[1], arithmetic(dtype))]

    return Section(name, minutes, (*section.commands, limited(dtype)), read)


def arithmetic(dtype: str) -> Any:
    """Of the embedded model, which W3 is played on."""
    from limits import Arithmetic

    from octavo.models.embedded import embedded_checkpoint

    return Arithmetic(json.loads((embedded_checkpoint() / "config.json").read_text(encoding="utf-8")), dtype)


SECTIONS = (
    Section("scheduler", 1.0, (("scheduler.py", "--running", "256,1024", "--steps", "160", "--repeat", "5",
            "--no-audit", "--vllm", "{vllm}"),), lambda reports: scheduler_targets("scheduler", reports[0])),
    Section("ready", 1.0, (("ready.py", "--repeat", "3"),), lambda reports: ready_targets("ready", reports[0])),
    Section("outside", 1.5, (("layers.py", "--batch", "32", "--prefill", "--repeat", "20", "--limit", "120"),),
            lambda reports: outside_targets("outside", reports[0])),
    Section("limit", 0.5, (limited("bf16"),), lambda reports: [bandwidth_target("limit", reports[0])]),
    Section("serve", 2.0, (("serve.py", "--repeat", "5", "--minutes", "3"),),
            lambda reports: [serve_target("serve", reports[0])]),
    peers("W1-bf16", "bf16", "W1", "octavo,openvino,llamacpp", (("W1", OFF, 1.0, None),), 1.0),
    peers("W1-fp32", "fp32", "W1", "octavo,openvino,llamacpp", (("W1", OFF, 1.0, None),), 1.0),
    peers("W2-bf16", "bf16", "W2", "octavo,openvino", (("W2", OFF, 1.4, 1.6),), 1.0),
    peers("W2-fp32", "fp32", "W2", "octavo,openvino", (("W2", OFF, 1.15, 1.35),), 1.5),
    peers("W4-bf16", "bf16", "W4", "octavo,openvino", (("W4", OFF, 1.4, None),), 2.0),
    peers("W4-fp32", "fp32", "W4", "octavo,openvino,vllm", (("W4", OFF, 1.1, 1.2),), 5.0),
    peers("W4-on-bf16", "bf16", "W4", "octavo:reuse,vllm:reuse", (("W4", ON, 1.3, None),), 2.5),
    peers("W4-on-fp32", "fp32", "W4", "octavo:reuse,vllm:reuse", (("W4", ON, 1.3, None),), 2.5),
    peers("int8", "int8", "W1,W2", "octavo,openvino,llamacpp", (("W1", OFF, 1.2, None), ("W2", OFF, 1.2, None)), 3.5),
    prompts("bf16", "octavo,openvino", 1.6, 3.0),
    prompts("fp32", "octavo", None, 2.0),
)  # fmt: skip
"""Beside the peers that came nearest to octavo so far; `--peers` asks for all of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.list:
        for section in SECTIONS:
            print(f"{section.name:<12} about {section.minutes:g} minutes: {'; '.join(map(' '.join, section.commands))}")
        return
    kept: dict[str, Any] = {}
    if options.results.exists():
        kept = json.loads(options.results.read_text(encoding="utf-8"))
    facts = machine_facts()
    if not options.show:
        for section in options.sections:
            if section.name in kept and not options.again and "failed" not in kept[section.name]:
                continue
            kept[section.name] = {"load_1m": os.getloadavg()[0]} | carried_out(section, options)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(kept), encoding="utf-8")
            print("\n".join(table(targets_of(section, kept[section.name]))), flush=True)
    targets = [
        target for section in SECTIONS if section.name in kept for target in targets_of(section, kept[section.name])
    ]
    print("\n" + "\n".join(table(targets)))
    missing = [section.name for section in SECTIONS if section.name not in kept]
    print(f"not run: {', '.join(missing) or 'none'}; {described(facts)}")
    rows = [
        {"section": t.section, "target": t.says, "gate": t.gate, "goal": t.goal, "figure": t.figure, "met": t.met,
         "note": t.note}
        for t in targets
    ]  # fmt: skip
    print(json.dumps({"benchmark": "targets", "machine": facts, "not_run": missing, "rows": rows}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [section.name for section in SECTIONS]
    add("--only", default=",".join(names), help="sections, by commas (default: all)")
    add("--again", action="store_true", help="run sections that are in the results already")
    add("--show", action="store_true", help="run nothing, print what is there")
    add("--list", action="store_true", help="the sections and what they run")
    add("--peers", action="store_true", help="beside every peer, not only the nearest: takes twice as long")
    add("--repeat", type=int, default=1, help="rounds of each comparison with peers (default 1)")
    add("--cache", type=Path, default=default_cache(), help="where environments of peers are kept")
    add("--results", type=Path, help="where results are kept (default: targets.json in the cache)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only.split(",")) - set(names))
    if unknown:
        parser.error(f"--only: no section {', '.join(unknown)}; there are {', '.join(names)}")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    options.sections = [section for section in SECTIONS if section.name in options.only.split(",")]
    options.results = options.results or options.cache / "targets.json"
    return options


def carried_out(section: Section, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON lines of a section's commands, or what failed."""
    print(f"\n== {section.name}, about {section.minutes:g} minutes", flush=True)
    vllm = options.cache / "environments" / f"vllm-{RECIPES['vllm'].key}" / "bin" / "python"
    fills = {"{cache}": str(options.cache), "{vllm}": str(vllm), "{repeat}": str(options.repeat)}
    limit_s = 120 + 120 * section.minutes * options.repeat * (3 if options.peers else 1)
    begun, reports = time.monotonic(), []
    for command in section.commands:
        words = [fills.get(word, word) for word in command[1:]]
        if options.peers and "--engines" in words:
            words[words.index("--engines") + 1] = every_peer(words[words.index("--engines") + 1])
        report = run_one(HERE / command[0], words, limit_s)
        if isinstance(report, str):
            return {"failed": f"{command[0]}: {report}"}
        reports.append(report)
    return {"reports": reports, "seconds": time.monotonic() - begun}


def every_peer(engines: str) -> str:
    return "octavo:reuse,vllm:reuse,openvino:reuse" if ":reuse" in engines else "octavo,openvino,vllm,llamacpp"


def run_one(script: Path, words: Sequence[str], limit_s: float) -> Report | str:
    """Its JSON line, what it prints being shown; or why there is none."""
    # in a session of its own, so that what it has started ends with it
    with subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"was not done within {limit_s:.0f} s"
    *shown, last = printed.rstrip().splitlines() or [""]
    print("\n".join(shown), flush=True)
    if process.returncode or not last.startswith("{"):
        return f"ended with {process.returncode}: {last[:200]}"
    report: Report = json.loads(last)
    return report


def targets_of(section: Section, kept: dict[str, Any]) -> list[Target]:
    if "failed" in kept:
        return [Target(section.name, section.name, None, None, None, kept["failed"])]
    return section.read(kept["reports"])


if __name__ == "__main__":
    main()
