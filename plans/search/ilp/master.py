"""The integer program of one grouping: which class of placements each task takes. PuLP, HiGHS or CBC.

Sets: tasks t, groups g of the grouping, machines m, columns c of each task (`Column`), intervals k of generation's
concurrency. Variables: x[t,c] in {0,1}; n[g,m] >= 0 GPUs of a group; phases inf, train; transfer w; objective z.

1. sum_c x[t,c] = 1                                    every task has a class
2. sum_c counts[c,m] x[t,c] <= n[g(t),m]               inside its group
3. sum_g n[g,m] <= GPUs of m                           groups are disjoint
4. sum_t held[t,c] x[t,c] + working[s] <= sum_m n[g,m] capacity[m], for every task s of g    memory, in sum over GPUs
5. in_place[t,c] <= x[owner(t),c]                      weights used in place cost no memory
6. inf >= sum of the inference tasks of g, train >= sum of its training tasks: Phi of the grouping (or of eta)
   (free overlap: inf and train >= each of their tasks alone)
7. w >= transfer bound of generation's class where it does not share GPUs with training
8. sync: z = gen + inf + train + w;  async: z >= gen + w, z >= inf + train + w
9. z <= cutoff                                         the best plan known
10. sum of x over a refuted choice <= its size - 1     lazily added by the planner

Every coefficient is a lower bound (of seconds or bytes), so z bounds `iteration_s` of every plan of the grouping.
Generation's columns come per interval [low, high] of the sequences decoded together: the time is that of `high`, the
memory that of `low`, so small intervals couple decoding to the memory that other tasks leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plans.cost.overlap import Objective
from plans.errors import SearchError, SolverUnavailableError
from plans.search.groupings import Grouping
from plans.search.ilp.classes import Column
from plans.search.quiet_highs import quiet_highs
from plans.search.solver_status import SolveStatus, Termination, Verdict, highs_verdict, pulp_verdict
from plans.spec.job import Mode
from plans.workflow import RlTask, TaskKind

GB = 1e9
#: PuLP's modules and expressions: the package has no types.
PulpModule = Any
Expression = Any
SOLVERS = ("highs", "cbc")
#: HiGHS: kSolutionStatusFeasible.
HIGHS_FEASIBLE_POINT = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A column as the program offers it."""

    column: Column
    """The class."""
    seconds: float
    """Lower bound of the task's seconds."""
    held_bytes: float
    """Resident bytes; 0 when in place."""
    working_bytes: float
    """Working bytes, at least."""
    transfer_s: float = 0.0
    """Lower bound of the weight transfer (generation apart from training)."""
    in_place: bool = False
    """Whether it uses the weights of its owner's column of the same class."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Sequences decoded together, summed over GPUs (generation)."""


Value = Callable[[Choice], float]


@dataclass(frozen=True, slots=True)
class MasterInput:
    """One program."""

    grouping: Grouping
    """The grouping."""
    mode: Mode
    """Sync or async."""
    eta: float | None
    """Override of Phi."""
    choices: Mapping[RlTask, Sequence[Choice]]
    """Columns of each task."""
    gpus: Sequence[int]
    """GPUs per machine."""
    capacity_bytes: Sequence[float]
    """Bytes that a GPU of each machine offers."""
    owners: Mapping[RlTask, RlTask]
    """Tasks whose weights others may use in place."""
    refuted: Sequence[Mapping[RlTask, Column]]
    """Choices of classes that hold no better plan."""
    cutoff_s: float
    """Only plans below it are of interest; infinite = any."""
    scale_s: float
    """Seconds that the objective is divided by."""
    objective: Objective = Objective.PHASES
    """Seconds that are minimised."""


@dataclass(frozen=True, slots=True)
class MasterAnswer:
    """What the solver found."""

    verdict: Verdict
    """Status and termination."""
    bound_s: float | None
    """Proved lower bound of the program; None = none known."""
    chosen: Mapping[RlTask, Choice] | None
    """The solution."""


def solve_master(
    data: MasterInput, *, solver: str, time_limit_s: float | None, relaxed: bool = False, gap: float = 1e-7
) -> MasterAnswer:
    """Build and solve the program.

    Args:
        data: the program.
        solver: `highs` or `cbc`; the other one is the fallback.
        time_limit_s: limit in seconds; None = none.
        relaxed: solve the linear relaxation only: a weaker bound, fast.
        gap: relative gap at which the solver may stop; the bound is valid all the same.

    Raises:
        SolverUnavailableError: neither the named solver nor its fallback runs here.
        SearchError: the solver failed.
    """
    import pulp  # heavy, and only this method needs it

    program = _Program(pulp, data)
    for name in (solver, *(other for other in SOLVERS if other != solver)):
        engine = _engine(pulp, name, time_limit_s, relaxed=relaxed, gap=gap)
        if engine is not None:
            program.problem.solve(engine)
            answer = program.answer(name, data.scale_s, relaxed=relaxed)
            if answer.verdict.termination is Termination.ERROR:
                raise SearchError(
                    f"The solver {name} failed on the program of {len(data.grouping)} groups; try the other."
                )
            return answer
    raise SolverUnavailableError("Neither HiGHS (package highspy) nor CBC runs here; install highspy.")


def _engine(pulp: PulpModule, name: str, time_limit_s: float | None, *, relaxed: bool, gap: float) -> Expression:
    limit = None if time_limit_s is None else max(0.05, time_limit_s)
    if name == "highs":
        try:
            engine = quiet_highs(is_relaxed=relaxed, gap_fraction=gap, time_limit_s=limit)
        except ImportError:
            return None
    else:
        engine = pulp.PULP_CBC_CMD(mip=not relaxed, msg=False, gapRel=0.0, threads=1, timeLimit=limit)
    return engine if engine.available() else None


def _count_on(machine: int) -> Value:
    return lambda choice: choice.column.cls.counts[machine]


class _Program:
    """The PuLP problem in blocks."""

    def __init__(self, pulp: PulpModule, data: MasterInput) -> None:
        self.pulp, self.data = pulp, data
        self.problem = pulp.LpProblem("motley", pulp.LpMinimize)
        self.group_of = {task: g for g, tasks in enumerate(data.grouping) for task in tasks}
        self.x = {
            task: [self.problem.add_variable(f"x_{task.value}_{i}", cat="Binary") for i in range(len(choices))]
            for task, choices in data.choices.items()
        }
        self.seconds = {task: self._sum(task, lambda choice: choice.seconds / data.scale_s) for task in data.choices}
        self._assignment()
        self._memory()
        self._in_place()
        self._objective()
        self._refuted()

    def _sum(self, task: RlTask, value: Value) -> Expression:
        pairs = zip(self.x[task], self.data.choices[task], strict=True)
        return self.pulp.LpAffineExpression([(x, value(choice)) for x, choice in pairs])

    def _assignment(self) -> None:
        pulp, data = self.pulp, self.data
        groups, machines = range(len(data.grouping)), range(len(data.gpus))
        self.size = [[self.problem.add_variable(f"n_{g}_{m}", 0, data.gpus[m]) for m in machines] for g in groups]
        for task in data.choices:
            self.problem += pulp.lpSum(self.x[task]) == 1
            for m in machines:
                used = self._sum(task, _count_on(m))
                self.problem += used <= self.size[self.group_of[task]][m]
        for m in machines:
            self.problem += pulp.lpSum(self.size[g][m] for g in groups) <= data.gpus[m]

    def _memory(self) -> None:
        for g, tasks in enumerate(self.data.grouping):
            held = self.pulp.lpSum(self._sum(task, lambda choice: choice.held_bytes / GB) for task in tasks)
            have = self.pulp.lpSum(
                n * (room / GB) for n, room in zip(self.size[g], self.data.capacity_bytes, strict=True)
            )
            for task in tasks:
                working = self._sum(task, lambda choice: choice.working_bytes / GB)
                self.problem += held + working <= have

    def _in_place(self) -> None:
        for task, owner in self.data.owners.items():
            if task not in self.x or self.group_of[task] != self.group_of.get(owner):
                continue
            of_class: dict[object, list[Expression]] = {}
            for x, choice in zip(self.x[task], self.data.choices[task], strict=True):
                if choice.in_place:
                    of_class.setdefault(choice.column.cls, []).append(x)
            for cls, variables in of_class.items():
                pairs = zip(self.x[owner], self.data.choices[owner], strict=True)
                same = [x for x, choice in pairs if choice.column.cls == cls]
                self.problem += self.pulp.lpSum(variables) <= self.pulp.lpSum(same)

    def _objective(self) -> None:
        data = self.data
        z, w = self.problem.add_variable("z", 0), self.problem.add_variable("w", 0)
        generation = self.seconds[RlTask.ACTOR_GENERATION]
        inference, training = self._phi(TaskKind.INFERENCE), self._phi(TaskKind.TRAINING)
        self.problem.setObjective(z)
        self.problem += w >= self._sum(RlTask.ACTOR_GENERATION, lambda choice: choice.transfer_s / data.scale_s)
        if data.mode is Mode.SYNC:
            self.problem += z >= generation + inference + training + w
        else:
            self.problem += z >= generation + w
            self.problem += z >= inference + training + w
        if data.cutoff_s < float("inf"):
            self.problem += z <= data.cutoff_s / data.scale_s

    def _phi(self, kind: TaskKind) -> Expression:
        pulp, eta = self.pulp, self.data.eta
        phase = self.problem.add_variable(f"phi_{kind.value}", 0)
        tasks = [task for task in self.data.choices if task.kind is kind]
        if self.data.objective is Objective.FREE_OVERLAP:
            for task in tasks:
                self.problem += phase >= self.seconds[task]
        elif eta is None:
            for group in self.data.grouping:
                self.problem += phase >= pulp.lpSum(self.seconds[task] for task in tasks if task in group)
        else:
            total = pulp.lpSum(self.seconds[task] for task in tasks)
            for task in tasks:
                self.problem += phase >= eta * self.seconds[task] + (1.0 - eta) * total
        return phase

    def _refuted(self) -> None:
        for choice in self.data.refuted:
            terms = [
                x
                for task, column in choice.items()
                for x, offered in zip(self.x[task], self.data.choices[task], strict=True)
                if offered.column.cls == column.cls
            ]
            self.problem += self.pulp.lpSum(terms) <= len(choice) - 1

    def answer(self, solver: str, scale_s: float, *, relaxed: bool) -> MasterAnswer:
        """Read the solver's outcome."""
        if solver == "highs":
            engine = self.problem.solverModel
            info = engine.getInfo()
            has_solution = int(info.primal_solution_status) == HIGHS_FEASIBLE_POINT
            verdict = highs_verdict(engine.getModelStatus().name, has_solution=has_solution)
            bound: float | None = float(info.objective_function_value if relaxed else info.mip_dual_bound)
            if (relaxed and verdict.status is not SolveStatus.OPTIMAL) or not math.isfinite(bound or 0.0):
                bound = None  # an unfinished relaxation bounds nothing
        else:
            pulp = self.pulp
            verdict = pulp_verdict(pulp.LpStatus[self.problem.status], pulp.LpSolution[self.problem.sol_status])
            # CBC's own bound does not come back through PuLP: the optimum is one, a time-out gives none.
            bound = self.pulp.value(self.problem.objective) if verdict.status is SolveStatus.OPTIMAL else None
        chosen = self._chosen() if verdict.status.has_solution and not relaxed else None
        return MasterAnswer(verdict, None if bound is None else bound * scale_s, chosen)

    def _chosen(self) -> Mapping[RlTask, Choice]:
        return {
            task: max(zip(self.x[task], choices, strict=True), key=lambda pair: pair[0].varValue or 0.0)[1]
            for task, choices in self.data.choices.items()
        }
