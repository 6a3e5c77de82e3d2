"""Who is compared: a plain torch loop and Motley's trainers, by number of processes and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from plans.spec.llm import LlmShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to train."""

    name: str
    kind: Literal["plain", "accelerate", "megatron"]
    num_processes: int
    tp: int = 1
    pp: int = 1
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Options of the engine beside those that the fields above mean."""

    @property
    def baseline(self) -> str:
        """The plain loop with as many processes."""
        return f"plain-{self.num_processes}"

    def fits(self, shape: LlmShape) -> bool:
        """Whether a model can be split so."""
        return shape.heads % self.tp == 0 and shape.kv_heads % self.tp == 0 and shape.layers >= self.pp

    def engine_options(self, shape: LlmShape) -> dict[str, JsonValue]:
        """Return the options of the engine's launch."""
        if self.kind == "accelerate":
            return {"num_processes": self.num_processes, **self.options}
        even, rest = divmod(shape.layers, self.pp)
        replicas = self.num_processes // (self.tp * self.pp)
        return {
            "tensor_parallel": self.tp,
            "stage_layers": [even + (stage < rest) for stage in range(self.pp)],
            "replica_samples": [1] * replicas,
            **self.options,
        }


SIDES = (
    Side(name="plain-1", kind="plain", num_processes=1),
    Side(name="accelerate-1", kind="accelerate", num_processes=1),
    Side(name="megatron-1", kind="megatron", num_processes=1),
    Side(name="plain-2", kind="plain", num_processes=2),
    Side(name="accelerate-2-ddp", kind="accelerate", num_processes=2),
    Side(name="accelerate-2-fsdp2", kind="accelerate", num_processes=2, options={"sharding": "full"}),
    Side(name="megatron-2-dp", kind="megatron", num_processes=2),
    Side(name="megatron-2-pp", kind="megatron", num_processes=2, pp=2),
    Side(name="megatron-2-tp", kind="megatron", num_processes=2, tp=2),
)
"""In the order of a turn."""
