"""Admission: may this waiting sequence start now, given who runs and what is free?

`max_utilization` packs: it starts a sequence when the tokens it has fit now, and may preempt
later. `guaranteed_no_evict` starts one only when everybody's declared maximum fits together, so
that a started request is never paused for capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """Figures in slabs (blocks, for a one-group model)."""

    total: int
    free: int
    promised: int
    """Still to be reserved so that running sequences can compute the tokens they already have."""
    promised_max: int
    """Still to be reserved so that they can reach their declared maxima."""
    need: int
    """Beyond `promised`, for the candidate to compute the tokens it has."""
    need_max: int
    """Beyond `promised_max`, for the candidate's declared maximum."""
    running: int
    resuming: bool
    """The candidate was preempted before."""


class AdmissionPolicy(Protocol):
    name: str
    guarantees: bool
    """Whether it counts on every free slab: then cached blocks go before a new slab is begun."""

    def admits(self, view: AdmissionView) -> bool: ...


class MaxUtilization:
    """Keeps a small reserve while others run, so that their next blocks do not preempt the newcomer at once.

    The reserve is 1% of the pool, and for a sequence that was preempted before also one block for
    each running one: coming back only to be paused again costs a whole prefill.
    """

    name = "max_utilization"
    guarantees = False

    def admits(self, view: AdmissionView) -> bool:
        reserve = 0
        if view.running:
            reserve = -(-view.total // 100)
            if view.resuming:
                reserve = max(reserve, view.running)
        return view.need + view.promised + reserve <= view.free


class GuaranteedNoEvict:
    """Exact with groups of several block sizes too: reserving, sliding and ending never raise what is still promised
    above what is free."""

    name = "guaranteed_no_evict"
    guarantees = True

    def admits(self, view: AdmissionView) -> bool:
        return view.promised_max + view.need_max <= view.free


ADMISSIONS: dict[str, type[AdmissionPolicy]] = {
    "max_utilization": MaxUtilization,
    "guaranteed_no_evict": GuaranteedNoEvict,
}


STEADY: tuple[type[AdmissionPolicy], ...] = (MaxUtilization, GuaranteedNoEvict)
"""They weigh what is free against what is promised, and nothing else: whom they refuse they refuse again until blocks
are given back."""


def admission_named(name: str) -> AdmissionPolicy:
    if name not in ADMISSIONS:
        raise ConfigError("admission", name, f"use one of {', '.join(ADMISSIONS)}")
    return ADMISSIONS[name]()
