"""One choice for each seam, resolved by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.policy.admission import AdmissionPolicy, MaxUtilization, admission_named
from octavo.policy.allocation import Allocation, Paged, allocation_named
from octavo.policy.batching import Batching, IterationBatching, batching_named
from octavo.policy.preemption import LatestLowest, PreemptionAction, Recompute, VictimPolicy, preemption_named
from octavo.policy.reuse import NoReuse, Reuse, reuse_named


@dataclass(frozen=True, slots=True)
class Policies:
    allocation: Allocation = field(default_factory=Paged)
    batching: Batching = field(default_factory=IterationBatching)
    admission: AdmissionPolicy = field(default_factory=MaxUtilization)
    victim: VictimPolicy = field(default_factory=LatestLowest)
    preemption: PreemptionAction = field(default_factory=Recompute)
    reuse: Reuse = field(default_factory=NoReuse)

    @classmethod
    def named(
        cls,
        *,
        allocation: str = "paged",
        batching: str = "iteration",
        admission: str = "max_utilization",
        reuse: str = "none",
        preemption: str = "recompute",
        wait_tokens: int = 1,
    ) -> Policies:
        """Raises `ConfigError` naming the seam and the known names. `wait_tokens` is `Reuse.wait_tokens`."""
        return cls(
            allocation=allocation_named(allocation),
            batching=batching_named(batching),
            admission=admission_named(admission),
            reuse=reuse_named(reuse, wait_tokens),
            preemption=preemption_named(preemption),
        )
