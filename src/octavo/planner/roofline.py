"""Lower bounds of time from a device's dense peaks: what a step reads and computes, and which is longer.

Owns the roofline and what limits the number of sequences at once. No efficiency factor is applied:
a real step takes longer, and the page says so. Geometry says what is read; weights what is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Chunked, Compressed, Growing, Windowed, parts_of
from octavo.planner.accelerators import Accelerator
from octavo.planner.paging import largest
from octavo.planner.values import Limit, Limits, Roofline, Weights

_MOST_BATCH = 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """One sequence's part of a decode step on one device."""

    flops: float
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device's share of a model: what a step reads and multiplies there."""

    accelerator: Accelerator
    geometry: ModelGeometry
    """Of this device."""
    weights_bytes: int
    parameters: float
    """On this device, those of all experts."""
    active_parameters: float
    """On this device, for one token."""
    weight_bits: int

    def weights_read_bytes(self, batch: int) -> float:
        """Weights that a step of `batch` tokens reads: of experts, those that some token goes to."""
        if not self.parameters or self.active_parameters >= self.parameters:
            return float(self.weights_bytes)
        share = self.active_parameters / self.parameters
        return self.weights_bytes * (1 - (1 - share) ** batch)

    def load(self, context: int) -> Load:
        """What one sequence of `context` positions adds to a decode step."""
        flops = 2 * self.active_parameters + self._attention_flops(context)
        return Load(flops, self.geometry.bytes_read(context))

    def decode_parts_s(self, load: Load, batch: int) -> tuple[float, float]:
        """(seconds of arithmetic, seconds of reading) of one step of `batch` such sequences."""
        read = self.weights_read_bytes(batch) + batch * load.state_bytes
        arithmetic = batch * load.flops / self.accelerator.flops(self.weight_bits)
        return arithmetic, read / self.accelerator.bandwidth_bytes_per_s

    def prefill_parts_s(self, tokens: int) -> tuple[float, float]:
        """The same of a prompt: every query meets on average half of the positions."""
        flops = tokens * (2 * self.active_parameters + self._attention_flops(max(1, tokens // 2)))
        read = self.weights_read_bytes(tokens) + self.geometry.bytes_kept(tokens)
        return flops / self.accelerator.flops(self.weight_bits), read / self.accelerator.bandwidth_bytes_per_s

    def _attention_flops(self, context: int) -> int:
        """Products of one query with keys and of its weights with values, all layers."""
        total = 0
        for state in self.geometry.layers:
            lender = self.geometry.layers[state.layer] if isinstance(state, Borrowed) else state
            for part in parts_of(lender):
                if not isinstance(part, (Growing, Windowed, Chunked, Compressed)):
                    continue
                widths = {c.name: c.shape[-1] for c in part.components}
                if "latent" in widths:
                    width = 2 * widths["latent"] + widths.get("rope_k", 0)
                else:
                    width = widths.get("k", 0) + widths.get("v", 0) or 2 * widths.get(
                        "kv", widths.get("compressed_kv", 0)
                    )
                per_token = max(1, part.bytes_kept(context) // max(1, context))
                met = (
                    part.bytes_read(context) // max(1, per_token) if isinstance(part, Growing) else _met(part, context)
                )
                total += 2 * self.geometry.num_attention_heads * width * met
        return total


def _met(part: Windowed | Chunked | Compressed, context: int) -> int:
    if isinstance(part, Windowed):
        return min(context, part.window_tokens + part.sink_tokens)
    if isinstance(part, Chunked):
        return min(context, part.chunk_tokens)
    entries = context // part.run_tokens
    return entries if part.read_entries is None else min(entries, part.read_entries)


def roofline(machine: Machine, context: int, batch: int, devices: int, price: float | None) -> Roofline:
    """Time of a decode step and of a prompt, for one replica of `devices`. `price` is of a device and hour."""
    load = machine.load(context)
    arithmetic, reading = machine.decode_parts_s(load, batch)
    decode = max(arithmetic, reading)
    prefill = machine.prefill_parts_s(context)
    rate = batch / decode if decode else 0.0
    overtakes = 1 + largest(lambda n: n * load.state_bytes <= machine.weights_read_bytes(n), _MOST_BATCH)
    bound = 1 + largest(lambda n: _waits_for_reading(machine.decode_parts_s(load, n)), _MOST_BATCH)
    return Roofline(
        context=context,
        batch=batch,
        decode_s=decode,
        decode_bound="arithmetic" if arithmetic > reading else "bandwidth",
        decode_read_bytes=round(machine.weights_read_bytes(batch)) + batch * load.state_bytes,
        decode_weights_bytes=round(machine.weights_read_bytes(batch)),
        decode_state_bytes=batch * load.state_bytes,
        tokens_per_s=rate,
        prefill_s=max(prefill),
        prefill_bound="arithmetic" if prefill[0] > prefill[1] else "bandwidth",
        batch_state_overtakes_weights=overtakes,
        batch_arithmetic_bound=None if bound > _MOST_BATCH else bound,
        dollars_per_million_tokens=None if price is None or not rate else price * devices / 3600 / rate * 1e6,
    )


def _waits_for_reading(parts: tuple[float, float]) -> bool:
    return parts[0] < parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What may limit the number of sequences at once besides memory."""

    context: int
    kv_sequences: int
    kv_tokens: int
    max_num_seqs: int
    step_tokens: int
    slo_s: float | None
    machine: Machine | None
    weights: Weights


def limits_of(bounds: Bounds) -> Limits:
    """The resource that binds first at the reference context, and from where on it is memory."""
    found = [
        Limit(resource="KV blocks", sequences=bounds.kv_sequences, says=f"{bounds.kv_tokens:,} live tokens fit"),
        Limit(resource="sequence limit", sequences=bounds.max_num_seqs, says="max_num_seqs"),
        Limit(
            resource="token budget", sequences=bounds.step_tokens, says="a step has one token of each running sequence"
        ),
    ]
    machine = bounds.machine
    if machine is not None and bounds.slo_s is not None:
        slo, load = bounds.slo_s, machine.load(bounds.context)
        most = largest(lambda n: max(machine.decode_parts_s(load, n)) <= slo, _MOST_BATCH)
        found.append(
            Limit(resource="SLO", sequences=most, says=f"a decode step within {slo * 1e3:g} ms at the roofline")
        )
    binding = min(found, key=lambda limit: limit.sequences)
    others = min(limit.sequences for limit in found[1:])
    from_context = -(-bounds.kv_tokens // others) if others else None
    step_bound = None
    if machine is not None and binding.sequences:
        arithmetic, reading = machine.decode_parts_s(machine.load(bounds.context), binding.sequences)
        step_bound = "arithmetic" if arithmetic > reading else "bandwidth"
    return Limits(
        context=bounds.context,
        binding=binding.resource,
        all=tuple(found),
        memory_from_tokens=bounds.kv_tokens if others * bounds.context >= bounds.kv_tokens else None,
        memory_from_context=from_context,
        step_bound=step_bound,
    )
