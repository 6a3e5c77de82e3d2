"""What leaving rows out did to the mixture of a dataset: how many rows of each part were read, and how many remain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The parts of a dataset: its environments, or the tasks of a procedural mixture."""

    part_of: Mapping[str, str] = field(default_factory=dict)
    """Part by prompt id, of every row that was not dropped as a duplicate."""

    rows_read: Mapping[str, int] = field(default_factory=dict)
    """Rows of each part in the source, duplicates included."""

    def shares(self, kept: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return for each part `rows_read`, `rows_kept` and the shares of all rows that these are, 0 to 1.

        Args:
            kept: Prompt ids of the rows that remain, of both splits.
        """
        remaining = Counter(self.part_of[prompt_id] for prompt_id in kept)
        num_read, num_kept = sum(self.rows_read.values()), remaining.total()
        return {
            part: {
                "rows_read": self.rows_read[part],
                "rows_kept": remaining[part],
                "share_read": self.rows_read[part] / num_read,
                "share_kept": remaining[part] / num_kept if num_kept else 0.0,
            }
            for part in sorted(self.rows_read)
        }


def mixture_text(shares: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the shares as one line for people, e.g. `add 50.0 % read, 33.3 % kept (10 of 20 rows); ...`."""
    return "; ".join(
        f"{part} {100 * found['share_read']:.1f} % read, {100 * found['share_kept']:.1f} % kept "
        f"({found['rows_kept']} of {found['rows_read']} rows)"
        for part, found in shares.items()
    )
