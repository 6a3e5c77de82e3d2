"""The gate of an iteration: it opens when the policy version that the iteration needs is committed.

`wait_for_policy` holds generation to its lead over training, `wait_for_turn` keeps training serial (lead 0). Which
version an iteration needs is the counter rule of `stages.staleness.pacing`.

Airflow's own ordering (`depends_on_past`, `max_active_runs`) is not trusted: a skipped task satisfies it, backfills
have their own budget, operators can mark anything. The head of the policy log in the object store is the authority.
"""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk import BaseOperator, Context

from plugins.policy_trigger import PolicyVersionTrigger, read_head_version
from stages.errors import DeadlineError, StageError
from stages.home import iteration_of
from stages.staleness.pacing import may_generate, version_needed
from storage.errors import TransientStorageError


class PolicyGateOperator(BaseOperator):
    """Waits, without holding a slot, until policy version `iteration - max_lead` is committed."""

    ui_color = "#f4ead5"

    def __init__(
        self,
        *,
        run: str,
        root: str,
        max_lead: int,
        deadline_s: float,
        holds: str = "generation",
        storage_options: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 - BaseOperator's own arguments
    ) -> None:
        """Keep the arguments.

        Args:
            run: Run name.
            root: Object-store root with the run's policies.
            max_lead: Iterations that what follows may run ahead of training; 0 demands the iteration's own version.
            deadline_s: Longest wait.
            holds: What the gate holds, for messages.
            storage_options: Options for opening the store.
            **kwargs: Arguments of `BaseOperator`.
        """
        super().__init__(**kwargs)
        self.run_name = run
        self.root = root
        self.max_lead = max_lead
        self.deadline_s = deadline_s
        self.holds = holds
        self.storage_options = dict(storage_options or {})

    def execute(self, context: Context) -> int:
        """Return the committed version at once if it suffices, else wait in the triggerer.

        Iteration 0 waits for nothing: it makes the initial policy itself.
        """
        iteration = iteration_of(context["dag_run"].logical_date)
        if iteration == 0:
            return 0
        needed = self.version_needed(iteration)
        try:
            found = read_head_version(self.root, self.run_name, self.storage_options)
        except TransientStorageError as error:
            self.log.warning("head of run %s can't be read now: %s", self.run_name, error)
            found = None
        if found is not None and may_generate(iteration, found, self.max_lead):
            self.log.info("policy version %d is committed, %d is needed", found, needed)
            return found
        self.log.info("policy version %d is needed, the head is %s; waiting", needed, found)
        self.defer(
            trigger=PolicyVersionTrigger(
                run=self.run_name,
                root=self.root,
                version=needed,
                deadline_at=time.time() + self.deadline_s,
                storage_options=self.storage_options,
            ),
            method_name="execute_complete",
        )

    def execute_complete(self, context: Context, event: dict[str, Any]) -> int:
        """Return the version that the trigger saw.

        Raises:
            DeadlineError: the version was not committed in time.
            StageError: the head can't be read.
        """
        iteration = iteration_of(context["dag_run"].logical_date)
        needed = self.version_needed(iteration)
        if "error" in event:
            raise StageError(f"the policy head of run {self.run_name} in {self.root} can't be read: {event['error']}")
        if not event["is_reached"]:
            maker = f"training of iteration {needed - 1}" if needed else "the initial policy of iteration 0"
            raise DeadlineError(
                f"{self.holds} of iteration {iteration} waits for {maker}: policy version {needed} of run "
                f"{self.run_name} was not committed within {self.deadline_s:g} s (the head is {event['version']}); "
                f"look at that iteration's tasks, then run `motley resume {self.run_name}`",
                needed=needed,
                found=event["version"],
            )
        return int(event["version"])

    def version_needed(self, iteration: int) -> int:
        """Return the policy version that an iteration waits for; the first ones wait for the initial policy, 0."""
        return version_needed(iteration, self.max_lead)
