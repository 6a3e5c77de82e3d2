"""What proves that an engine holds a policy version: the canary that the trainer stored, and a note that it held."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stages.engines.canary import CanaryRecord
from stages.engines.client import RemoteEngine
from stages.errors import ContractError
from storage.policies import Policy


def canary_of(policy: Policy) -> CanaryRecord:
    """Return the canary that the trainer stored with a policy version.

    Raises:
        ContractError: the policy has none.
    """
    document = policy.manifest.metadata.get("canary")
    if not isinstance(document, dict):
        raise ContractError(
            f"policy version {policy.version} of run {policy.run} carries no canary in {policy.manifest.key}, so no "
            "engine can be proved to hold it; publish it with the stages of this version."
        )
    return CanaryRecord.from_json(document)


class WeightsProof:
    """A local note that a live process was proved to hold a policy version, so that every stage need not repeat it."""

    def __init__(self, state_dir: Path, engine: RemoteEngine, policy: Policy) -> None:
        record = engine.record
        self._path = state_dir / "canary" / f"{record.identity}.json"
        self._content = {
            "pid": record.pid,
            "process_started_at": record.process_started_at,
            "policy_version": policy.version,
            "weights_hash": policy.weights_hash,
        }

    def stands(self) -> bool:
        """Whether this very process was proved to hold these weights."""
        try:
            return bool(json.loads(self._path.read_text(encoding="utf-8")) == self._content)
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        """Note the proof."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self._content), encoding="utf-8")
        temporary.replace(self._path)
