"""What this machine reads from memory and multiplies at best, with a number of threads: measured, not looked up.

Reading is the best of several sums over an array far larger than the caches; multiplying the best of torch's
large matrix products, by type, and of a loop of fused multiply-adds that stays in registers. The loops are a few
lines of C, compiled at run time where there is a compiler; without one torch's figures stand alone, and say so.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

REPEAT = 4
PRODUCT_SIZES = (1024, 2048)
FMA_ROUNDS = 20_000_000
ACCUMULATORS = 12

PROBES = """
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float floats __attribute__((vector_size(BYTES)));
typedef long longs __attribute__((vector_size(BYTES)));
#define EACH(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
int lanes(void) { return BYTES / 4; }
float multiply(long rounds, float by, float plus) {
#define NAME(i) floats a##i = (floats){} + (float)i;
  EACH(NAME)
  floats b = (floats){} + by, c = (floats){} + plus;
#define STEP(i) a##i = a##i * b + c;
  for (long n = 0; n < rounds; n++) { EACH(STEP) }
#define SUM(i) total += a##i;
  floats total = {};
  EACH(SUM)
  return total[0] + total[BYTES / 4 - 1];
}
long read_all(const longs *from, long vectors) {
  longs a = {}, b = {}, c = {}, d = {};
  for (long n = 0; n + 4 <= vectors; n += 4) {
    __builtin_prefetch((const char *)(from + n) + 2048);
    a ^= from[n]; b ^= from[n + 1]; c ^= from[n + 2]; d ^= from[n + 3];
  }
  a ^= b ^ c ^ d;
  return a[0] ^ a[BYTES / 8 - 1];
}
"""


@dataclass(frozen=True, slots=True)
class Rates:
    threads: int
    read_bytes_per_s: float
    read_by: str
    product_flops: dict[str, float]
    """Of torch's largest matrix products, by type."""
    fma_flops: float | None
    """Of fp32 multiply-adds that stay in registers; None where they could not be compiled."""
    note: str = ""
    all_read: dict[str, float] = field(default_factory=dict)

    def best_flops(self, dtype: str) -> float:
        """What arithmetic of this type can count on: weights in bf16 may be computed in fp32 as well."""
        kinds = ("fp32",) if dtype == "fp32" else ("fp32", dtype)
        return max(*(self.product_flops[kind] for kind in kinds), self.fma_flops or 0.0)

    def or_better(self, other: Rates) -> Rates:
        """Of every rate the higher one."""
        reading = {name: max(rate, other.all_read.get(name, 0.0)) for name, rate in self.all_read.items()}
        best = max(reading, key=lambda name: reading[name])
        products = {kind: max(rate, other.product_flops[kind]) for kind, rate in self.product_flops.items()}
        fma = [rate for rate in (self.fma_flops, other.fma_flops) if rate is not None]
        better = replace(self, read_bytes_per_s=reading[best], read_by=best, all_read=reading)
        return replace(better, product_flops=products, fma_flops=max(fma, default=None))

    def described(self) -> list[str]:
        fma = f"not measured: {self.note}" if self.fma_flops is None else f"{self.fma_flops / 1e9:.0f} GFLOP/s"
        products = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in self.product_flops.items())
        read = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in self.all_read.items())
        return [
            f"memory read: {self.read_bytes_per_s / 1e9:.1f} GB/s with {self.threads} threads ({read})",
            f"torch's largest products: {products} GFLOP/s; fp32 multiply-adds in registers: {fma}",
        ]


def measure_rates(threads: int, megabytes: int) -> Rates:
    """About three seconds on two idle cores."""
    import torch

    words = np.ones(megabytes * 2**20 // 8, dtype=np.int64)
    as_floats = torch.from_numpy(words.view(np.float32))
    reading = {
        "torch sum": words.nbytes / _best(as_floats.sum),
        "torch max": words.nbytes / _best(torch.from_numpy(words).max),
    }
    fma, note = None, "there is no C compiler here"
    with tempfile.TemporaryDirectory() as folder:
        library = _compiled(Path(folder))
        if library is not None:
            note = ""
            reading["read loop"] = words.nbytes / _best(lambda: _read(library, words, threads))
            fma = _multiply_adds(library, threads) / _best(lambda: _multiply(library, threads))
    best = max(reading, key=lambda name: reading[name])
    products = {"fp32": _products(torch, torch.float32), "bf16": _products(torch, torch.bfloat16)}
    return Rates(threads, reading[best], best, products, fma, note, reading)


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _products(torch: Any, kind: Any) -> float:
    best = 0.0
    for size in PRODUCT_SIZES:
        one, other = torch.ones(size, size, dtype=kind), torch.ones(size, size, dtype=kind)
        best = max(best, 2 * size**3 / _best(lambda one=one, other=other: one @ other))
    return best


def _compiled(folder: Path) -> Any | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "probes.c", folder / "probes.so"
    source.write_text(PROBES, encoding="utf-8")
    # -ffast-math would let a compiler see through the sums
    words = [
        compiler,
        "-O3",
        "-march=native",
        "-ffp-contract=fast",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
    ]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return None
    loaded = ctypes.CDLL(str(library))
    loaded.multiply.restype = ctypes.c_float
    loaded.multiply.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.c_float]
    loaded.read_all.restype = ctypes.c_long
    loaded.read_all.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return loaded


def _read(library: Any, words: np.ndarray[Any, np.dtype[np.int64]], threads: int) -> None:
    parts = np.array_split(words, threads)
    vector = library.lanes() // 2
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of the interpreter's lock
        for result in [pool.submit(library.read_all, part.ctypes.data, len(part) // vector) for part in parts]:
            result.result()


def _multiply(library: Any, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for result in [pool.submit(library.multiply, FMA_ROUNDS, 0.5, 1.0) for _ in range(threads)]:
            result.result()


def _multiply_adds(library: Any, threads: int) -> float:
    return 2.0 * FMA_ROUNDS * ACCUMULATORS * library.lanes() * threads
