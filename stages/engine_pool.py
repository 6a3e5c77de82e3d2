"""The engines of one machine, as the plan of an iteration wants them, holding the weights that a stage asks for.

Thread counts, devices and batch sizes come from the plan. Whatever an engine loads is proved by the canary: its
log-probs on fixed rows against those that the trainer stored with the policy.

Iterations overlap in async mode, so stages share a generation engine. Weights are loaded only under the engine's
weights lock, and which version is wanted is decided under it. Who needs one version for several calls (evaluation)
keeps the lock; who takes any version within its bounds (rollouts) holds it while it loads only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plans.plan import Replica, TaskPlan
from plans.workflow import RlTask
from stages.engines.canary import check_canary
from stages.engines.client import RemoteEngine
from stages.engines.file_lock import exclusive
from stages.engines.gang_place import GangPlace
from stages.engines.launch import EngineLaunch, EngineRecord, Role
from stages.engines.manager import EngineManager
from stages.errors import ContractError, WeightMismatchError
from stages.gang_layout import GangLayout, gang_layout, has_several_machines
from stages.policy_files import loadable_policy, policy_at_home, policy_directory
from stages.sharding import machine_of
from stages.single_machine_plan import CPU
from stages.spec.execution import LoraSpec
from stages.training_launch import CRITIC_ENGINE, SPLITTING_ENGINES, trainer_options
from stages.weights_proof import WeightsProof, canary_of
from storage.policies import Policy

if TYPE_CHECKING:  # stages.context makes the pool
    from stages.context import StageContext

_ONE_DEVICE_ENGINES: Final = frozenset({"transformers", CRITIC_ENGINE})


class EnginePool:
    """Acquires engines for a stage and loads weights into them."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self.manager = EngineManager(context.state_dir)
        self._open: dict[str, RemoteEngine] = {}

    def generation(self, replica: int, wanted: Callable[[], Policy]) -> RemoteEngine:
        """Return the generation engine of a replica, holding the wanted policy version, proved by the canary.

        Args:
            replica: Replica of the plan's generation task.
            wanted: Says which version; asked while nobody else can load one. Another stage may load another version as
                soon as this returns.
        """
        with self.pinned_generation(replica, wanted) as engine:
            return engine

    @contextmanager
    def pinned_generation(self, replica: int, wanted: Callable[[], Policy]) -> Iterator[RemoteEngine]:
        """Give the engine as `generation` does; no other stage loads weights into it within the block."""
        launch = self._generation_launch(replica)
        with self._weights_lock(launch):
            yield self._with_weights(launch, wanted())[0]

    def refresh_generation(self, replica: int, wanted: Callable[[], Policy]) -> bool:
        """Load the wanted policy version into a replica's engine if that is running; whether weights were loaded."""
        launch = self._generation_launch(replica)
        if launch.identity() not in {record.identity for record in self.manager.list()}:
            return False
        with self._weights_lock(launch):
            return self._with_weights(launch, wanted())[1]

    @contextmanager
    def _weights_lock(self, launch: EngineLaunch) -> Iterator[None]:
        context = self._context
        what = f"the weights of {launch.role} engine {launch.name} of run {launch.run} (replica {launch.replica})"
        folder = context.state_dir / "weights_locks"
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + context.deadline.remaining_s(what)
        with exclusive(folder / launch.identity(), deadline, what):
            yield

    def _generation_launch(self, replica: int) -> EngineLaunch:
        job = self._context.job
        placed = self._context.plan.tasks[RlTask.ACTOR_GENERATION].replicas[replica]
        return self._launch(
            "generation",
            job.engines.generation.name,
            RlTask.ACTOR_GENERATION,
            placed,
            replica,
            dtype=job.engines.generation.dtype_at(self._context.machine),
            max_num_seqs=placed.decode_batch or job.planner.generation.max_num_seqs,
            options={**job.engines.generation.options},
            lora=job.engines.training.lora,
        )

    def reference(self, replica: int, policy: Policy) -> RemoteEngine:
        """Return the scoring engine of a replica of the reference policy, holding its weights."""
        launch = self._inference_launch("scoring", RlTask.REFERENCE_INFERENCE, replica)
        return self._with_weights(launch, policy)[0]

    def training(self, model_dir: Path, place: GangPlace | None = None) -> RemoteEngine:
        """Return the training engine of this machine; weights come with `load_checkpoint`.

        Args:
            model_dir: Gives architecture and tokenizer.
            place: Where it stands, if the plan spreads training over several machines.

        Raises:
            ContractError: the plan spreads training over several machines, and no place is given.
        """
        if place is not None:
            return self._acquire(self._gang_launch(place), model_dir)
        engine = self._context.job.engines.training
        launch = self._training_launch("training", engine.name, RlTask.ACTOR_TRAINING)
        return self._acquire(launch.model_copy(update={"lora": engine.lora}), model_dir)

    def first_training(self, model_dir: Path) -> RemoteEngine:
        """Return an engine that makes the first version: that of training, or where a gang trains, one process here.

        Resume points don't depend on the engine or on its ranks.
        """
        task = self._context.plan.tasks[RlTask.ACTOR_TRAINING]
        if not has_several_machines(task):
            return self.training(model_dir)
        gpus = () if self._context.machine.gpu == CPU else task.gpus[:1]
        launch = self._trainer_launch(
            "training", "accelerate", RlTask.ACTOR_TRAINING, 0, num_processes=1, gpus=gpus, is_checked=False
        )
        return self._acquire(launch, model_dir)

    def live_gang(self, layout: GangLayout) -> GangPlace | None:
        """Return the place of a live training engine of a gang, if it is what the plan still wants."""
        for record in self._gang_engines():
            place = record.launch.gang
            if place is not None and (place.machines, place.ranks) == (layout.machines, layout.ranks):
                return place if record.launch == self._gang_launch(place) else None
        return None

    def end_gang(self) -> None:
        """End this machine's engines of training gangs, at once; may be called from another thread."""
        for record in self._gang_engines():
            self.manager.end(record)

    def _gang_engines(self) -> list[EngineRecord]:
        # A manager of its own: this may run beside a call of `manager` in another thread.
        found = EngineManager(self._context.state_dir).list()
        return [r for r in found if r.launch.gang is not None and r.launch.run == self._context.run.name]

    def _gang_launch(self, place: GangPlace) -> EngineLaunch:
        context = self._context
        name, task = context.job.engines.training.name, context.plan.tasks[RlTask.ACTOR_TRAINING]
        layout = gang_layout(task, name)
        gpus = () if context.machine.gpu == CPU else layout.devices_of(context.machine.name)
        here = next(
            (index for index in range(len(task.replicas)) if machine_of(task, index) == context.machine.name), 0
        )  # fmt: skip
        launch = self._trainer_launch(
            "training", name, RlTask.ACTOR_TRAINING, here, num_processes=task.dp, gpus=gpus, is_checked=False
        )
        return launch.model_copy(update={"gang": place, "replica": 0})

    def critic_training(self, model_dir: Path) -> RemoteEngine:
        """Return the engine that trains the critic on this machine; weights come with `load_checkpoint`.

        Args:
            model_dir: A directory of the critic.

        Raises:
            ContractError: the plan spreads the critic's training over several machines.
        """
        return self._acquire(self._training_launch("critic", CRITIC_ENGINE, RlTask.CRITIC_TRAINING), model_dir)

    def critic_inference(self, replica: int, model_dir: Path) -> tuple[RemoteEngine, bool]:
        """Return the engine that gives a replica's values, and whether it is the one that trains the critic too.

        Where the plan puts inference onto the devices of training, one engine does both.
        """
        tasks, machine = self._context.plan.tasks, self._context.machine
        placed = tasks[RlTask.CRITIC_INFERENCE].replicas[replica]
        trained = tasks[RlTask.CRITIC_TRAINING]
        devices = {gpu for stage in placed.stages for gpu in stage.gpus}
        if devices <= set(trained.gpus) and machine_of(trained, 0) == machine.name:
            return self.critic_training(model_dir), True
        launch = self._trainer_launch("critic", CRITIC_ENGINE, RlTask.CRITIC_INFERENCE, replica, num_processes=1)
        return self._acquire(launch, model_dir), False

    def reward_model(self, replica: int, directory: Path, weights_hash: str) -> RemoteEngine:
        """Return the engine of a replica of the reward model, holding its weights.

        Args:
            replica: Replica of the task `reward_inference`.
            directory: The reward model.
            weights_hash: What the weights must hash to.
        """
        launch = self._inference_launch("reward", RlTask.REWARD_INFERENCE, replica)
        engine = self._acquire(launch, directory)
        if engine.info().weights_hash != weights_hash:
            self._context.log("load", role="reward", engine=launch.name, path=directory)
            engine.load_weights(directory, 0, weights_hash)
        return engine

    def _inference_launch(self, role: Role, rl_task: RlTask, replica: int) -> EngineLaunch:
        """Return the launch of a replica that computes forward passes of a model nobody trains."""
        job = self._context.job
        return self._launch(
            role,
            "transformers",
            rl_task,
            self._context.plan.tasks[rl_task].replicas[replica],
            replica,
            dtype=job.engines.generation.dtype_at(self._context.machine),
            max_num_seqs=job.planner.generation.max_num_seqs,
            options={},
        )

    def _training_launch(self, role: Role, name: str, rl_task: RlTask) -> EngineLaunch:
        context = self._context
        task = context.plan.tasks[rl_task]
        machines = {gpu.rpartition("/")[0] for gpu in task.gpus}
        if machines != {context.machine.name}:
            raise ContractError(
                f"plan {context.plan_number} does {rl_task.value} on {', '.join(sorted(machines))}, but "
                f"this stage trains on one machine, and this is {context.machine.name}; plan training onto one machine "
                "and run the stage there."
            )
        gpus = () if context.machine.gpu == CPU else task.gpus
        return self._trainer_launch(role, name, rl_task, 0, num_processes=task.dp, gpus=gpus)

    def _trainer_launch(
        self,
        role: Role,
        name: str,
        rl_task: RlTask,
        replica: int,
        *,
        num_processes: int,
        gpus: Sequence[str] | None = None,
        is_checked: bool = True,
    ) -> EngineLaunch:
        job, task = self._context.job, self._context.plan.tasks[rl_task]
        return self._launch(
            role,
            name,
            rl_task,
            task.replicas[replica],
            replica,
            dtype="fp32" if job.planner.training.precision.value == "fp32" else "bf16",
            max_num_seqs=job.planner.generation.max_num_seqs,
            options={**trainer_options(job, name, task, num_processes=num_processes)},
            gpus=gpus,
            is_checked=is_checked,
        )

    @cached_property
    def base_directory(self) -> Path:
        """Directory of policy version 0, which is kept for good: it gives engines architecture and tokenizer."""
        return policy_directory(self._context, policy_at_home(self._context, 0))

    def discard(self, engine: RemoteEngine) -> None:
        """End an engine whose state can't be trusted; the next acquisition starts a fresh one."""
        self.manager.stop(engine.record.identity)

    def close(self) -> None:
        """Close the connections; the engines live on."""
        for engine in self._open.values():
            engine.close()
        self._open.clear()

    def _launch(
        self,
        role: Role,
        name: str,
        task: RlTask,
        placed: Replica,
        replica: int,
        *,
        dtype: str,
        max_num_seqs: int,
        options: dict[str, object],
        gpus: Sequence[str] | None = None,
        is_checked: bool = True,
        lora: LoraSpec | None = None,
    ) -> EngineLaunch:
        context = self._context
        machine, lengths, engines = context.machine, context.job.planner.lengths, context.job.engines
        if is_checked:
            _check_replica(context.plan.tasks[task], task, replica, name, machine.name, is_cpu=machine.gpu == CPU)
        devices = placed.stages[0].gpus
        is_cpu = machine.gpu == CPU
        return EngineLaunch.model_validate(
            {
                "role": role,
                "name": name,
                "run": context.run.name,
                "machine": machine.name,
                "gpus": tuple(gpus) if gpus is not None else (() if is_cpu else devices),
                "replica": replica,
                "threads": _threads(name, devices) if is_cpu else max(1, (os.cpu_count() or 1) // machine.count),
                "dtype": dtype,
                "max_prompt_tokens": lengths.prompt,
                "max_completion_tokens": lengths.response,
                "max_num_seqs": max_num_seqs,
                "options": options,
                "lora": lora,
                "idle_timeout_s": engines.idle_timeout_s,
            }
        )

    def _acquire(self, launch: EngineLaunch, model_dir: Path) -> RemoteEngine:
        context = self._context
        left_s = context.deadline.remaining_s(f"{launch.role} engine {launch.name}")
        engine = self.manager.acquire(
            launch, model_dir, timeout_s=min(left_s, context.job.engines.start_timeout_s), call_timeout_s=left_s
        )
        if (before := self._open.get(engine.record.identity)) is not None:
            before.close()
        self._open[engine.record.identity] = engine
        return engine

    def _with_weights(self, launch: EngineLaunch, policy: Policy) -> tuple[RemoteEngine, bool]:
        """Return the engine, proved to hold the policy, and whether it had to load it."""
        context = self._context
        files = loadable_policy(context, policy)
        engine = self._acquire(launch, self.base_directory)
        info = engine.info()
        proof = WeightsProof(context.state_dir, engine, policy)
        if (info.policy_version, info.weights_hash) == (policy.version, policy.weights_hash) and proof.stands():
            return engine, False
        context.log("load", role=launch.role, engine=launch.name, version=policy.version)
        try:
            is_urgent = context.job.asynchrony.partial_rollouts
            engine.load_weights(files.directory, policy.version, policy.weights_hash, files.base, is_urgent=is_urgent)
            self._prove(engine, policy, context.job.canary_max_gap)
        except WeightMismatchError:
            self.discard(engine)
            raise
        proof.record()
        return engine, True

    def _prove(self, engine: RemoteEngine, policy: Policy, max_gap: float) -> None:
        record = canary_of(policy)
        check_canary(record, engine.score(record.rows), max_gap=max_gap, engine=engine.record.describe())


def _threads(engine: str, cores: Sequence[str]) -> int:
    """On cpu devices the tensor-parallel degree is the number of threads (docs/adr/0004), or of processes (0013)."""
    return 1 if engine in SPLITTING_ENGINES else len(cores)


def _check_replica(task: TaskPlan, name: RlTask, replica: int, engine: str, machine: str, *, is_cpu: bool) -> None:
    placed = task.replicas[replica]
    faults = []
    if machine_of(task, replica) != machine:
        faults.append(f"it is placed on {machine_of(task, replica)}, this machine is {machine}")
    if len(placed.stages) > 1 and engine not in SPLITTING_ENGINES:
        faults.append(f"it has {len(placed.stages)} pipeline stages, engine {engine} runs one")
    if not is_cpu and engine in _ONE_DEVICE_ENGINES and len(placed.stages[0].gpus) > 1:
        faults.append(f"it has tp = {len(placed.stages[0].gpus)}, engine {engine} uses one GPU per replica")
    if faults:
        raise ContractError(
            f"replica {replica} of {name.value} can't run here: {'; '.join(faults)}; re-plan, or choose another engine."
        )
