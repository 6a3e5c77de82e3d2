"""Section `asynchrony` of a job: how generation and training overlap. Only with `mode: async`."""

from __future__ import annotations

from pydantic import Field

from stages.spec.section import Section


class AsynchronySpec(Section):
    """Pacing, reserve and interruption; the staleness bound itself is `max_staleness` of the job."""

    generate_ahead: int | None = Field(default=None, ge=1)
    """Iterations that generation may run ahead of training; absent = `max_staleness`. Smaller keeps rollouts younger at
    the price of waiting; larger needs `spare_prompts`, since rollouts over the bound are withheld."""
    spare_prompts: int = Field(default=0, ge=0)
    """Prompt groups that every iteration samples beyond its batch. They lie in the buffer, oldest first, and take the
    place of groups that are withheld; what grows too old there is discarded and counted."""
    partial_rollouts: bool = False
    """Whether new weights interrupt completions that are being sampled; they go on under the new weights. Engines that
    can't be interrupted finish what they have begun."""
