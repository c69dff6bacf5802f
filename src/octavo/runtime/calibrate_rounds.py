"""A calibration by several processes, one after the other: what differs between processes becomes part of intervals.

Owns which process measures what (each goes on where the one before stopped, so that all scenes have their turn, with
the linear kernels that the first one chose), and that they end with whoever asked. A process is `calibrate_round`;
nothing of torch is loaded here.

    config, time --> process 1 --> samples, time each scene has had --> process 2 --> ... --> one fit over all
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.cost.calibration import Calibration
from octavo.cost.laws import Law
from octavo.cost.learn import Sample, learn, usual_steps
from octavo.cost.step import StepShape
from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError, OctavoError

Tell = Callable[[float, str], None]
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What each process is asked for."""

    config: Mapping[str, Any]
    """The engine's options, flat."""
    seconds: float
    """Of measuring, of all processes together; each loads the model besides."""
    processes: int = 8
    over_s: float = 0.0
    """Processes begin evenly over so many seconds, with nothing to do in between: what a machine is off by from one
    minute to the next is then in what processes differ by. 0: each when the one before it has ended."""
    max_batch: int | None = None
    max_context: int | None = None
    temperature: float = 0.0
    seed: int = 0
    disk: str | None = None
    clock: str = "wall"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError("budget", self.seconds, "must be above 0 seconds")
        if not 1 <= self.processes <= 64:
            raise ConfigError("processes", self.processes, "must be from 1 to 64")
        if not 0 <= self.over_s < float("inf"):
            raise ConfigError("over", self.over_s, "must be 0 seconds or more")
        if self.over_s and self.processes == 1:
            raise ConfigError("over", self.over_s, "means nothing for one process; give more --processes")

    def begins_s(self, number: int) -> float:
        """Seconds after the first one that process `number` begins at the earliest; the last one at the end."""
        return self.over_s * number / max(1, self.processes - 1)

    def asked(self, number: int, spent: list[float] | None, linear: str | None = None) -> dict[str, Any]:
        """Of process `number`, when scenes have had so many seconds each and an earlier one runs `linear` kernels."""
        config = dict(self.config) if linear is None else {**self.config, "linear_backend": linear}
        measuring = {"seconds": self.seconds / self.processes, "max_batch": self.max_batch,
                     "max_context": self.max_context, "temperature": self.temperature, "seed": self.seed}  # fmt: skip
        return {"config": config, "measuring": measuring, "clock": self.clock, "threads": self.threads,
                "spent": spent, "transfers": number == self.processes - 1, "disk": self.disk}  # fmt: skip


def calibrate_rounds(
    rounds: Rounds,
    machine: Mapping[str, Any],
    tell: Tell = lambda share, text: None,
    keep: Callable[[list[Sample]], None] = lambda samples: None,
) -> Calibration:
    """`keep` is given all steps that were measured. Raises `ConfigError`, or whatever else a process refused with."""
    samples: list[Sample] = []
    spent: list[float] | None = None
    told: dict[str, Any] = {}
    loading = 0.0
    linear: str | None = None
    begun = time.monotonic()
    for number in range(rounds.processes):
        part = _part(tell, number, rounds.processes)
        _idle_until(begun + rounds.begins_s(number), part)
        told = _measured(rounds.asked(number, spent, linear), part)
        linear = linear or linear_backend_of(told["description"]["engine"])
        spent, loading = told["spent"], loading + told["loading_s"]
        samples += [_sample(one, number) for one in told["samples"]]
    keep(samples)
    tell(1.0, "fit")
    laws = {route: TransferLaw.of(law, route) for route, law in told["transfers"].items()}
    about = {"seconds": rounds.seconds, "over_s": rounds.over_s, "seed": rounds.seed,
             "processes": rounds.processes, "loading_s": loading}  # fmt: skip
    return calibration_from(samples, told["description"], machine, laws, about)


def calibration_from(
    samples: list[Sample],
    description: Mapping[str, Any],
    machine: Mapping[str, Any],
    transfers: Mapping[str, TransferLaw],
    about: Mapping[str, Any],
) -> Calibration:
    """The fit, and what it holds for: the file. `description` is `calibrate_record.described`.

    Of a machine whose memory has two speeds only steps at the usual one are fitted.
    """
    measured = len(samples)
    samples, speed = usual_steps(samples)
    learned = learn(samples, [Law(kind, reach) for kind, reach in description["laws"]])
    shapes = [sample.shape for sample in samples]
    return Calibration(
        model_name=description["model_name"],
        model=description["model"],
        config=description["config"],
        machine=dict(machine) | description["machine"],
        engine=description["engine"],
        step=learned.step.sum,
        host=learned.host.sum,
        knots=learned.knots,
        run_interval=learned.run_interval,
        transfers=transfers,
        errors=learned.errors,
        about={
            "steps": len(samples),
            "scenes": len({sample.scene for sample in samples}),
            "processes_fitted": len({sample.process for sample in samples}),
            "most_chunks": max(shape.chunks for shape in shapes),
            "most_tokens": max(shape.tokens for shape in shapes),
            "most_context_tokens": max(shape.context_tokens for shape in shapes),
            **({} if speed is None else speed.told(measured - len(samples))),
            **about,
        },
    )


def linear_backend_of(engine: Mapping[str, Any]) -> str | None:
    """The option that chooses the linear kernels of this engine again, without timing any. None: there are none."""
    name = str(engine.get("linear") or "").split(" ")[0]
    return name if name in ("native", "torch") else None


def _part(tell: Tell, number: int, processes: int) -> Tell:
    prefix = f"process {number + 1} of {processes}: " if processes > 1 else ""
    return lambda share, text: tell((number + share) / processes, prefix + text)


def _idle_until(moment: float, tell: Tell) -> None:
    while (left := moment - time.monotonic()) > 0:
        tell(0.0, f"begins in {left:.0f} s")
        time.sleep(min(left, 1.0))


def _measured(asked: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """What one process measured; it has ended when this returns or raises."""
    command = [sys.executable, "-m", "octavo.runtime.calibrate_round"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdin is not None  # for the type: both are pipes
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.close()
        for line in process.stdout:
            told = json.loads(line)
            if "share" in told:
                tell(told["share"], told["text"])
            elif "refused" in told:
                raise _refusal(told["refused"])
            else:
                measured: dict[str, Any] = told["measured"]
                return measured
    except BrokenPipeError:
        pass  # it has ended, and has said why on the error stream
    finally:
        process.stdout.close()
        _end(process)
    raise OctavoError(f"a measuring process ended with status {process.returncode} and measured nothing")


def _end(process: subprocess.Popen[str]) -> None:
    """It ends by itself once it has answered; whoever interrupts does not leave it behind."""
    try:
        process.wait(_PATIENCE_S if sys.exc_info()[0] is None else 0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _refusal(words: list[str]) -> OctavoError:
    return ConfigError(*words) if len(words) == 3 else OctavoError(*words)


def _sample(told: list[Any], process: int) -> Sample:
    scene, step, starts, counts, sampled, device_s, host_s, rates = told
    return Sample(scene, step, StepShape.from_chunks(starts, counts, sampled), device_s, host_s, process, tuple(rates))
