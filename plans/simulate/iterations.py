"""Iterations of a plan, synchronous and asynchronous.

Synchronous: generate, infer, train and move the weights follow each other with barriers, as the DAG runs them.
Asynchronous: generation of iteration k starts when a policy version >= k - max_staleness is in place, takes the
newest one, and overlaps the training of earlier iterations; training is serial.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from plans.errors import SearchError
from plans.plan import Plan, Replica, check_plan
from plans.simulate.generation import GenerationReplica, SampleQueue
from plans.simulate.network import Network
from plans.simulate.outages import GpuHall
from plans.simulate.physics import Physics, StagePlace
from plans.simulate.pipeline import MicroBatch, PipelineReplica
from plans.simulate.placement import decode_batch_of, stages_of
from plans.simulate.recorder import Recorder
from plans.simulate.result import SimulationResult, summarise
from plans.simulate.settings import Dispatch, SimulationSettings, response_lengths
from plans.simulate.training import TrainingTask, shares
from plans.simulate.weights import WeightMover
from plans.spec.cluster import Cluster
from plans.spec.job import Job, Mode, Recompute
from plans.workflow import RlTask, TaskKind, workflow_of

if TYPE_CHECKING:
    import simpy


def simulate(
    cluster: Cluster, job: Job, plan: Plan, settings: SimulationSettings, *, source_name: str = "plan"
) -> SimulationResult:
    """Execute a plan for some iterations and report what happened.

    Args:
        cluster: the cluster.
        job: the job.
        plan: a plan of exactly this cluster and job.
        settings: what happens to it.
        source_name: the name that messages use for the plan, normally the file's path.

    Raises:
        SpecError: the settings or the plan break rules.
        PlanMismatchError: the plan was made for another cluster or job.
        SearchError: simpy is not installed.
    """
    try:
        import simpy
    except ImportError as error:
        raise SearchError("the simulator needs simpy, which is not installed; install motley[planner].") from error
    settings.check(cluster)
    check_plan(plan, cluster, job, source_name=source_name)
    env = simpy.Environment()
    runner = _Runner(env, cluster, job, plan, settings)
    process = env.process(runner.asynchronous() if job.mode is Mode.ASYNC else runner.synchronous())
    env.run(until=process)
    return summarise(runner.recorder, cluster, job, runner.gpus, runner.prompt_tokens)


class _Runner:
    def __init__(
        self, env: simpy.Environment, cluster: Cluster, job: Job, plan: Plan, settings: SimulationSettings
    ) -> None:
        self._env = env
        self._cluster, self._job, self._plan, self._settings = cluster, job, plan, settings
        self._rng = np.random.default_rng(settings.seed)
        self.recorder = Recorder()
        self.prompt_tokens = float(job.lengths.prompt_mean or job.lengths.prompt)
        self._physics = Physics(cluster, settings.efficiency, settings.stragglers)
        self._network = Network(env, cluster, self._physics)
        self._hall = GpuHall(env, cluster, settings.failures, self.recorder)
        workflow = workflow_of(job)
        self._inference = workflow.of_kind(TaskKind.INFERENCE)
        self._training = workflow.of_kind(TaskKind.TRAINING)
        self._stages = {
            task: [stages_of(replica, cluster, job, task) for replica in placed.replicas]
            for task, placed in plan.tasks.items()
        }
        self.gpus = tuple(sorted({g for placed in self._stages.values() for r in placed for s in r for g in s.gpus}))
        self._mover = WeightMover(
            env, cluster, self._physics, self._network,
            trained=_flat(self._stages[RlTask.ACTOR_TRAINING]), serving=_flat(self._stages[RlTask.ACTOR_GENERATION]),
        )  # fmt: skip

    def synchronous(self) -> Generator[simpy.Event]:
        """Run the phases of every iteration one after the other."""
        for iteration in range(self._settings.iterations):
            lengths = self._draw()
            yield from self._generate(lengths, iteration)
            yield from self._consume(lengths, iteration, generated_with=iteration)

    def asynchronous(self) -> Generator[simpy.Event]:
        """Run producer and consumer beside each other."""
        import simpy

        self._version = 0
        self._published = self._env.event()
        rollouts = simpy.Store(self._env)
        self._env.process(self._produce(rollouts))
        for iteration in range(self._settings.iterations):
            asked = self._env.now
            rollout = yield rollouts.get()
            lengths, version = cast("tuple[Sequence[int], int]", rollout)
            self.recorder.consumer_wait_s += self._env.now - asked
            yield from self._consume(lengths, iteration, generated_with=version)
            self._version = iteration + 1
            self._published.succeed()
            self._published = self._env.event()

    def _produce(self, rollouts: simpy.Store) -> Generator[simpy.Event]:
        for iteration in range(self._settings.iterations):
            asked = self._env.now
            while self._version < iteration - self._job.max_staleness:
                yield self._published
            self.recorder.producer_wait_s += self._env.now - asked
            version, lengths = self._version, self._draw()
            yield from self._generate(lengths, iteration)
            yield rollouts.put((lengths, version))

    def _draw(self) -> Sequence[int]:
        lengths = [int(n) for n in response_lengths(self._job, self._settings, self._rng)]
        self.recorder.tokens_by_iteration.append(sum(lengths))
        return lengths

    def _generate(self, lengths: Sequence[int], iteration: int) -> Generator[simpy.Event]:
        placed = self._plan.tasks[RlTask.ACTOR_GENERATION]
        if self._settings.dispatch is Dispatch.QUEUE:
            queues = [SampleQueue()] * placed.dp
            queues[0].waiting.extend(lengths)
        else:
            queues = [SampleQueue() for _ in placed.replicas]
            is_bucketed = self._settings.dispatch is Dispatch.BUCKETS
            deal = shares_by_length if is_bucketed else planned_shares
            for queue, share in zip(queues, deal(lengths, placed.replicas), strict=True):
                queue.waiting.extend(share)
        work = []
        for replica, stages, queue in zip(placed.replicas, self._stages[RlTask.ACTOR_GENERATION], queues, strict=True):
            decode_batch = decode_batch_of(replica, stages, self._cluster, self._job, self._plan)
            engine = GenerationReplica(
                self._env, self._physics, stages, decode_batch, self.prompt_tokens, self.recorder
            )
            start = _bind(engine.run, queue, iteration)
            work.append(self._env.process(self._hall.work(engine.gpus, start)))
        yield self._env.all_of(work)

    def _consume(self, lengths: Sequence[int], iteration: int, generated_with: int) -> Generator[simpy.Event]:
        totals = [self.prompt_tokens + length for length in lengths]
        yield self._env.all_of([
            self._env.process(process) for task in self._inference for process in self._infer(task, totals, iteration)
        ])  # fmt: skip
        trainers = [self._trainer(task, totals, iteration) for task in self._training]
        yield self._env.all_of([
            self._env.process(self._hall.work(trainer.gpus, trainer.run)) for trainer in trainers
        ])  # fmt: skip
        self.recorder.lags[iteration - generated_with] += len(lengths)
        yield from self._mover.run()
        self.recorder.iteration_ends_s.append(self._env.now)

    def _infer(self, task: RlTask, totals: Sequence[float], iteration: int) -> list[Generator[simpy.Event]]:
        placed = self._plan.tasks[task]
        work = []
        for replica, stages, share in zip(
            placed.replicas, self._stages[task], shares(totals, [r.samples for r in placed.replicas]), strict=True
        ):
            batches = _micro_batches(share, replica.micro_batch_size)
            engine = PipelineReplica(
                self._env, self._physics, self._network, stages, is_training=False, is_recomputed=False
            )
            start = _bind(self._recorded, engine, batches, task, iteration)
            work.append(self._hall.work(engine.gpus, start))
        return work

    def _recorded(
        self, engine: PipelineReplica, batches: Sequence[MicroBatch], task: RlTask, iteration: int
    ) -> Generator[simpy.Event]:
        started = self._env.now
        try:
            yield from engine.run(batches)
        finally:
            self.recorder.busy(engine.gpus, task.value, started, self._env.now, iteration)

    def _trainer(self, task: RlTask, totals: Sequence[float], iteration: int) -> TrainingTask:
        placed = self._plan.tasks[task]
        parts = shares(totals, [r.samples for r in placed.replicas])
        return TrainingTask(
            self._env,
            self._physics,
            self._network,
            [
                PipelineReplica(
                    self._env, self._physics, self._network, stages, is_training=True,
                    is_recomputed=self._job.training.recompute is Recompute.FULL,
                )
                for stages in self._stages[task]
            ],
            self._stages[task],
            [_micro_batches(part, r.micro_batch_size) for part, r in zip(parts, placed.replicas, strict=True)],
            updates=self._job.training.updates_per_iteration,
            label=(task.value, iteration),
            recorder=self.recorder,
        )  # fmt: skip


def planned_shares(lengths: Sequence[int], replicas: Sequence[Replica]) -> list[list[int]]:
    """Return each replica's samples in the order in which they were drawn."""
    return shares(lengths, [replica.samples for replica in replicas])


def shares_by_length(lengths: Sequence[int], replicas: Sequence[Replica]) -> list[list[int]]:
    """Return each replica's samples by length: the longest to the replica that is meant for the longest.

    Replicas without `lengths` come last, in their order. Inside a share the longest samples start first.
    """
    order = sorted(range(len(replicas)), key=lambda i: (-(replicas[i].lengths or (0, 0))[1], i))
    cut = shares(sorted(lengths, reverse=True), [replicas[i].samples for i in order])
    dealt: list[list[int]] = [[] for _ in replicas]
    for index, share in zip(order, cut, strict=True):
        dealt[index] = share
    return dealt


def _micro_batches(lengths: Sequence[float], size: int) -> list[MicroBatch]:
    return [MicroBatch.of(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def _flat(replicas: Sequence[Sequence[StagePlace]]) -> list[StagePlace]:
    return [stage for replica in replicas for stage in replica]


def _bind(function: Callable[..., Generator[simpy.Event]], *args: object) -> Callable[[], Generator[simpy.Event]]:
    return lambda: function(*args)
