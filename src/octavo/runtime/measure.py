"""What an engine really holds, for the ledger's column beside the predictions.

Owns two kinds of figures. What is *held* is counted: arrays and tensors that octavo's own objects
refer to, each memory once. What is *transient* is a peak: `PeakMeter` looks at the largest steps of
a run and sees how far memory rises above what remains afterwards, on CPU by the kernel's high-water
mark of resident memory, on CUDA by torch's. Decides nothing, predicts nothing.

    forward begins ........ output head begins ........ next forward begins
      |-- temporary buffers --|-- logits and sampling ----|

Invariant: a figure that this machine cannot give is left out, with a note, never made up.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.models.load import held_bytes
from octavo.planner.ledger import ALLOCATOR, GRAPHS, KERNELS, LOGITS, OTHER, TABLES, TEMPORARY, WORKSPACE, Ledger
from octavo.runtime.executor import TorchExecutor

_SELF = Path("/proc/self")


class PeakMeter:
    """Watches the model's forward passes until `stop`. Only a step larger than all before it is measured."""

    def __init__(self, engine: Engine, memory: _Memory | None = None) -> None:
        executor = _executor(engine)
        self.notes: tuple[str, ...] = ()
        self.temporary_bytes: int | None = None
        self.logits_bytes: int | None = None
        self._memory = memory if memory is not None else _memory_of(executor.arena.device)
        self._most_tokens = self._most_rows = 0
        self._phase = ""
        self._floor = 0
        self._hooks: list[Any] = []
        reason = self._memory.unavailable()
        if reason is not None:
            self.notes = (f"peaks are not measured: {reason}",)
            return
        model = executor.model
        self._hooks.append(model.register_forward_pre_hook(self._forward_begins, with_kwargs=True))
        head = model.get_output_embeddings()
        if head is not None:
            self._hooks.append(head.register_forward_pre_hook(self._head_begins))

    def stop(self) -> None:
        self._step_ended()
        while self._hooks:
            self._hooks.pop().remove()

    def _forward_begins(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._step_ended()
        tokens, keep = kwargs["input_ids"].numel(), kwargs.get("logits_to_keep")
        rows = tokens if keep is None else len(keep)
        if tokens > self._most_tokens or rows > self._most_rows:
            self._most_tokens, self._most_rows = max(tokens, self._most_tokens), max(rows, self._most_rows)
            self._phase = "forward"
            self._floor = self._memory.begin()

    def _head_begins(self, module: Any, args: Any) -> None:
        if self._phase != "forward":
            return
        peak = self._memory.peak()
        # Memory that stays (scratch, pages of the arena touched first) is no buffer of this step.
        self._floor = max(self._floor, self._memory.begin())
        self.temporary_bytes = max(self.temporary_bytes or 0, peak - self._floor)
        self._phase = "head"

    def _step_ended(self) -> None:
        if self._phase == "head":
            peak = self._memory.peak()
            self.logits_bytes = max(self.logits_bytes or 0, peak - max(self._floor, self._memory.now()))
        self._phase = ""


def measured_ledger(engine: Engine, meter: PeakMeter | None = None) -> Ledger:
    """The deployment's ledger with everything that can be measured now, and the peaks of `meter`."""
    if engine.deployment is None:
        raise ConfigError("engine", engine.model_name, "has no deployment, so there is no ledger to measure against")
    executor = _executor(engine)
    found = _held(engine, executor)
    if meter is not None:
        peaks = {TEMPORARY: meter.temporary_bytes, LOGITS: meter.logits_bytes}
        found |= {label: size for label, size in peaks.items() if size is not None}
    ledger: Ledger = engine.deployment.ledger
    return ledger.measured(found)


def _held(engine: Engine, executor: TorchExecutor) -> dict[str, int]:
    ledger = engine.deployment.ledger
    counted: set[int] = {executor.arena.bytes.untyped_storage().data_ptr()}
    scheduler = engine.core.scheduler
    weights = held_bytes(executor.model)
    kv = executor.arena.bytes.nbytes
    workspace = array_bytes(executor.backend, counted) + getattr(executor.backend, "scratch_bytes", 0)
    pool = array_bytes(scheduler.cache.pool, counted)
    tables = array_bytes((scheduler, executor), counted)
    found = {
        ledger.weights.label: weights,
        ledger.kv.label: kv,
        WORKSPACE: workspace,
        TABLES: tables,
        ALLOCATOR: pool,
        GRAPHS: 0,
    }
    if executor.arena.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(executor.arena.device)
        reserved = torch.cuda.memory_reserved(executor.arena.device)
        found[KERNELS] = max(0, total - free - reserved)
        found[OTHER] = max(0, reserved - weights - kv - workspace)
        return found
    found[KERNELS] = 0
    resident = _status_bytes("VmRSS")
    arena = _resident_bytes(executor.arena.bytes.data_ptr())
    if resident is not None and arena is not None:
        found[OTHER] = max(0, resident - weights - arena - workspace - tables - pool)
    return found


def array_bytes(root: object, counted: set[int] | None = None) -> int:
    """Bytes of every array and tensor that octavo's objects under `root` refer to, each memory once.

    `counted` holds the memories not to be counted again, and learns those that were. Objects of other
    packages (a model, a tokenizer) are not entered.
    """
    counted = set() if counted is None else counted
    seen: set[int] = set()
    waiting = [root]
    total = 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (np.ndarray, torch.Tensor)):
            address, size = _memory_under(item)
            if address not in counted:
                counted.add(address)
                total += size
        else:
            waiting.extend(_inside(item))
    return total


def _memory_under(item: np.ndarray | torch.Tensor) -> tuple[int, int]:
    """Address and size of the whole allocation, whatever view of it this is."""
    if isinstance(item, torch.Tensor):
        storage = item.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(item.base, np.ndarray):
        item = item.base
    return item.ctypes.data, item.nbytes


def _inside(item: object) -> Iterator[object]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        yield from item
    elif type(item).__module__.partition(".")[0] == "octavo":
        yield from getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                yield getattr(item, name, None)


class _Memory(Protocol):
    """Memory in use on one device, with a high-water mark that can be set back."""

    def unavailable(self) -> str | None:
        """Why it cannot be measured here, if it cannot."""
        ...

    def begin(self) -> int:
        """Set the mark back to what is in use now; returns that."""
        ...

    def peak(self) -> int: ...

    def now(self) -> int: ...


class _ResidentMemory:
    """Resident memory of this process. Freed memory that the allocator keeps is given back before each look."""

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def unavailable(self) -> str | None:
        if self._trim is None:
            return "this C library cannot give freed memory back"
        if _status_bytes("VmHWM") is None:
            return f"{_SELF / 'status'} has no high-water mark"
        try:
            self.begin()
        except OSError as error:
            return f"{_SELF / 'clear_refs'} cannot be written ({error.strerror})"
        return None

    def begin(self) -> int:
        now = self.now()
        (_SELF / "clear_refs").write_text("5")
        return now

    def peak(self) -> int:
        return _status_bytes("VmHWM") or 0

    def now(self) -> int:
        if self._trim is not None:
            self._trim(0)
        return _status_bytes("VmRSS") or 0


class _CudaMemory:
    """What torch has allocated on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def unavailable(self) -> str | None:
        return None

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.now()

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))


def _memory_of(device: torch.device) -> _Memory:
    return _CudaMemory(device) if device.type == "cuda" else _ResidentMemory()


def _executor(engine: Engine) -> TorchExecutor:
    executor = engine.core.executor
    if not isinstance(executor, TorchExecutor):
        raise ConfigError("executor", type(executor).__name__, "holds no model; only a TorchExecutor can be measured")
    return executor


def _status_bytes(name: str) -> int | None:
    """A size from the kernel's status file; None where there is none."""
    try:
        text = (_SELF / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _resident_bytes(address: int) -> int | None:
    """Resident bytes of the mapping that holds `address`."""
    try:
        text = (_SELF / "smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    inside = False
    for line in text.splitlines():
        head = line.split(maxsplit=1)[0] if line else ""
        if not head.endswith(":"):
            low, dash, high = head.partition("-")
            inside = bool(dash) and int(low, 16) <= address < int(high, 16)
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    return None
