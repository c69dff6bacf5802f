"""Measures what steps take, by driving a real engine through scenes: the step's wall time is what a server would see.

Owns how a scene is brought about. Its sequences are submitted as requests, the real scheduler seats and grows them, and
what only leads up to the scene is taken as run without being computed. Then real steps run and are timed: the
executor's part, and the host's, which is all the rest. All scenes are rehearsed first, with nothing computed: the
memory behind their blocks is there before anything is timed, as in a server that has been in use.

    submit -> pretended steps -> [chunk's request -> pretended start] -> timed steps -> all discarded

Invariant: the engine is empty between two scenes, and its limits are what they were once a calibration has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.cost.design import Range, Scene, design
from octavo.cost.learn import Sample
from octavo.cost.step import StepShape
from octavo.engine.engine import Engine
from octavo.errors import ConfigError, InvariantViolation
from octavo.runtime.executor import TorchExecutor
from octavo.scheduling.events import Event, StepEnded
from octavo.scheduling.plan import StepPlan, StepResult
from octavo.scheduling.request import SamplingParams

DECODE_STEPS = 3
"""Timed in each scene in which all decode."""
_MOST_PRETENDED = 64
_OUTPUT = 12
_UNPLAYED = 1e-9
"""Seconds: scenes that have had less have not been played."""
_POOL_SHARE = 0.8
"""Of the pool that a scene may fill: admission keeps room for what is promised."""

Tell = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How far and how long to measure. None: as far as the engine's own limits go."""

    seconds: float = 120.0
    max_batch: int | None = None
    max_context: int | None = None
    temperature: float = 0.0
    seed: int = 0
    timer: Callable[[], float] = time.perf_counter
    """What steps are timed by. The time that all may take is that of the clock on the wall."""
    rate: Callable[[], float] | None = None
    """Reads the memory's speed, between scenes. None: nobody looks."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError("budget", self.seconds, "must be above 0 seconds")


@dataclass(slots=True, eq=False)
class Probe:
    """Between a core and its executor: sees every plan, and may take it as run."""

    executor: TorchExecutor
    pretending: bool = False
    shape: StepShape | None = None
    touched: list[np.ndarray] = field(default_factory=list)
    """By group: which slots have memory behind them."""

    def __post_init__(self) -> None:
        layout, slabs = self.executor.arena.layout, self.executor.arena.n_slabs
        self.touched = [np.zeros(slabs * group.blocks_per_slab, dtype=bool) for group in layout.groups]

    def submit(self, plan: StepPlan) -> None:
        self.shape = StepShape.of(plan)
        if not self.pretending:
            self.executor.submit(plan)
            return
        arena = self.executor.arena
        for blocks in plan.new_blocks:
            new = blocks.slots[~self.touched[blocks.group][blocks.slots]]
            for unit in arena.units(blocks.group, new):
                arena.clear(blocks.group, int(unit))
            self.touched[blocks.group][new] = True
        self.executor.pretend(plan)

    def collect(self) -> StepResult:
        result: StepResult = self.executor.collect()
        return result

    def close(self) -> None:
        self.executor.close()


class Stage:
    """An engine on which scenes are played. Leave it by `close`."""

    def __init__(self, engine: Engine, measuring: Measuring) -> None:
        executor = engine.core.executor
        if not isinstance(executor, TorchExecutor):
            raise ConfigError(
                "executor", type(executor).__name__, "runs no model; only a TorchExecutor can be measured"
            )
        if engine.core.depth != 0:
            raise ConfigError("pipeline_depth", engine.core.depth, "steps are timed one by one: calibrate with 0")
        self.engine = engine
        self.measuring = measuring
        self.probe = Probe(executor)
        self._limits = engine.core.scheduler.limits
        self._events: list[Event] = []
        self._tokens = np.random.default_rng(measuring.seed)
        self._names: list[str] = []
        self._count = 0
        self._rehearsing = False
        self._timer = engine.core.timer
        engine.core.timer = measuring.timer
        engine.core.executor = self.probe
        engine.observers.append(self._events.extend)

    def close(self) -> None:
        self.engine.core.executor = self.probe.executor
        self.engine.core.timer = self._timer
        self.engine.core.scheduler.limits = self._limits
        self.engine.observers.remove(self._events.extend)

    def range(self) -> Range:
        """What this engine can be driven to."""
        cache, limits, asked = self.engine.core.scheduler.cache, self._limits, self.measuring
        context = min(limits.max_model_len - _OUTPUT - DECODE_STEPS, cache.max_tokens_per_sequence() - _OUTPUT)
        return Range(
            max_batch=min(limits.max_num_seqs, asked.max_batch or limits.max_num_seqs),
            max_context=max(1, min(context, asked.max_context or context)),
            max_step_tokens=limits.max_num_batched_tokens,
            pool_tokens=int(_POOL_SHARE * cache.layout.most_tokens(cache.pool.slabs)),
        )

    def rehearse(self, scenes: Sequence[Scene]) -> None:
        """Play each with every step pretended: the memory behind all blocks that they will take is there afterwards."""
        self._rehearsing = True
        try:
            for number, scene in enumerate(scenes):
                self.play(scene, number)
        finally:
            self._rehearsing = False

    def play(self, scene: Scene, number: int) -> list[Sample]:
        """Bring a scene about and time its steps; none where it is rehearsed."""
        try:
            samples = self._played(scene, number)
            return [] if self._rehearsing else samples
        finally:
            for name in self._names:
                self.engine.discard(name)
            self._names = []
            self.engine.core.scheduler.limits = self._limits

    def _played(self, scene: Scene, number: int) -> list[Sample]:
        rows = len(scene.decodes)
        samples: list[Sample] = []
        if rows:
            self._allow(rows, sum(scene.decodes) + rows)
            self._submit(scene.decodes)
            self._pretend_until_decoding(rows)
            self._step()  # not timed: caches hold what leads up to the scene, and in service what came before
            samples += [self._timed(number, step) for step in range(0 if scene.chunks else DECODE_STEPS)]
        if scene.chunks:
            longer = 0 if scene.ends else 1
            first = scene.chunks[0] + scene.start + longer
            self._submit((first, *(chunk + longer for chunk in scene.chunks[1:])))
            if scene.start:
                self._allow(rows + 1, rows + scene.start)
                self._pretend()
            self._allow(rows + len(scene.chunks), rows + sum(scene.chunks))
            samples.append(self._timed(number, DECODE_STEPS))
            if scene.ends:
                samples.append(self._timed(number, DECODE_STEPS + 1))
        return samples

    def _submit(self, prompts: Sequence[int]) -> None:
        most = self._limits.vocab_size
        for length in prompts:
            name = f"scene-{self._count}"
            self._count += 1
            params = SamplingParams(
                max_tokens=_OUTPUT, temperature=self.measuring.temperature, ignore_eos=True, seed=self._count
            )
            self.engine.add(name, {"prompt_token_ids": self._tokens.integers(0, most, length).tolist()}, params)
            self._names.append(name)

    def _allow(self, rows: int, tokens: int) -> None:
        """So many sequences and tokens in a step, neither more nor fewer."""
        self.engine.core.scheduler.limits = replace(
            self._limits, max_num_seqs=rows, max_num_batched_tokens=max(rows, tokens)
        )

    def _pretend_until_decoding(self, rows: int) -> None:
        running = self.engine.core.scheduler.running
        for _ in range(_MOST_PRETENDED):
            self._pretend()
            live = running.live_rows()
            if len(live) == rows and (running.computed[live] == running.known[live] - 1).all():
                return
        raise InvariantViolation("calibration", f"{rows} sequences do not come to decode together")

    def _step(self) -> None:
        if self._rehearsing:
            self._pretend()
        else:
            self.engine.step()

    def _pretend(self) -> None:
        self.probe.pretending = True
        try:
            self.engine.step()
        finally:
            self.probe.pretending = False

    def _timed(self, number: int, step: int) -> Sample:
        self._events.clear()
        begun = self.measuring.timer()
        self._step()
        took = self.measuring.timer() - begun
        ended = next((event for event in self._events if isinstance(event, StepEnded)), None)
        if ended is None or ended.execute_s is None or self.probe.shape is None:
            raise InvariantViolation("calibration", f"scene {number} ran no step")
        return Sample(number, step, self.probe.shape, ended.execute_s, max(took - ended.execute_s, 1e-7))


def measure_steps(
    engine: Engine,
    measuring: Measuring,
    tell: Tell = lambda share, text: None,
    spent: Sequence[float] | None = None,
) -> tuple[list[Sample], list[float]]:
    """Play every scene of the design, then again those that have had the least time, until the time is over.

    Returns the steps, and the seconds that each scene has had: another process goes on from there when given them.
    """
    stage = Stage(engine, measuring)
    try:
        scenes = design(stage.range(), measuring.seed)
        # Turns go by the time a scene has had, first ones by chance: short ones come often, between long ones.
        had = np.random.default_rng(measuring.seed).random(len(scenes)) * _UNPLAYED
        if spent is not None and len(spent) == len(scenes):
            had = np.array(spent, dtype=np.float64)
        samples: list[Sample] = []
        stage.rehearse(scenes)
        stage.play(max(scenes, key=lambda scene: sum(scene.chunks)), 0)  # caches, allocators and threads warm up
        rates = () if measuring.rate is None else (measuring.rate(),)
        begun = now = time.monotonic()
        while now - begun < measuring.seconds:
            number = int(had.argmin())
            played = int(np.count_nonzero(had > _UNPLAYED))
            share = (now - begun) / measuring.seconds
            tell(share, f"{len(samples)} steps, {played} of {len(scenes)} scenes")
            played_now = stage.play(scenes[number], number)
            had[number] += time.monotonic() - now
            if measuring.rate is not None:
                rates = (rates[-1], measuring.rate())
            samples += [replace(sample, rates=rates) for sample in played_now]
            now = time.monotonic()
        return samples, had.tolist()
    finally:
        stage.close()
