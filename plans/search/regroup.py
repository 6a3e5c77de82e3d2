"""Moves between arms for the final polish (extension): tasks change groups, GPUs change groups, groups merge.

Halving settles levels 1 and 2 on a coarse grid. These moves leave the grid: sizes change by any number of GPUs, and a
task may join another group. Tasks of the groups that a move touches get fresh layouts that fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plans.search.genome import Genome
from plans.search.groupings import Grouping
from plans.search.layouts import TaskLayout
from plans.search.mutations.exchange_machines import exchange_machines
from plans.search.seeds import Draws
from plans.search.tools import SearchTools
from plans.spec.job import Mode
from plans.workflow import RlTask

#: Share of moves after which the groups' layouts are ranked anew, which costs as much as some hundred evaluations.
RANK_SHARE = 0.3

Move = Callable[[SearchTools, Genome, Draws], Genome | None]


def move_gpus(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Move some GPUs of one machine from one group to another; None with one group."""
    if len(genome.grouping) < 2:
        return None
    source, target = rng.pair(len(genome.grouping))
    members = genome.gpus[source]
    machine_of = tools.problem.machine_of
    machine = machine_of[members[rng.below(len(members))]]
    block = [gpu for gpu in members if machine_of[gpu] == machine]
    count = len(block) if rng.random() < 0.5 else rng.between(1, len(block))
    if count >= len(members):
        return None
    moved = set(block[-count:])
    gpus = list(genome.gpus)
    gpus[source] = tuple(gpu for gpu in members if gpu not in moved)
    gpus[target] = tuple(sorted((*gpus[target], *moved)))
    return _refitted(tools, genome, genome.grouping, tuple(gpus), {source, target}, rng)


def exchange_and_refit(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Exchange machines between two groups and lay their tasks out again; None with one group."""
    exchanged = exchange_machines(tools, genome, rng)
    if exchanged is None:
        return None
    touched = {index for index, gpus in enumerate(exchanged.gpus) if gpus != genome.gpus[index]}
    return _refitted(tools, exchanged, genome.grouping, exchanged.gpus, touched, rng)


def swap_groups(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Exchange all GPUs of two groups and lay their tasks out again; None with one group."""
    if len(genome.grouping) < 2:
        return None
    a, b = rng.pair(len(genome.grouping))
    gpus = list(genome.gpus)
    gpus[a], gpus[b] = gpus[b], gpus[a]
    return _refitted(tools, genome, genome.grouping, tuple(gpus), {a, b}, rng)


def swap_tasks(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Let two tasks of one kind trade groups; None where no such pair is apart."""
    tasks = list(genome.layouts)
    pairs = [
        (first, second)
        for position, first in enumerate(tasks)
        for second in tasks[position + 1 :]
        if first.kind is second.kind and genome.group_of(first) != genome.group_of(second)
    ]
    if not pairs:
        return None
    first, second = pairs[rng.below(len(pairs))]
    trade = {first: second, second: first}
    grouping = tuple(
        tuple(sorted((trade.get(task, task) for task in group), key=_position)) for group in genome.grouping
    )
    touched = {genome.group_of(first), genome.group_of(second)}
    return _refitted(tools, genome, grouping, genome.gpus, touched, rng)


def move_task(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Move a task of a group of several into another group; None where there is no such pair."""
    pairs = [
        (task, source, target)
        for source, tasks in enumerate(genome.grouping)
        if len(tasks) > 1
        for task in tasks
        for target in range(len(genome.grouping))
        if target != source
    ]
    if not pairs:
        return None
    task, source, target = pairs[rng.below(len(pairs))]
    groups = list(genome.grouping)
    groups[source] = tuple(other for other in groups[source] if other is not task)
    groups[target] = tuple(sorted((*groups[target], task), key=_position))
    if not _is_allowed(tools, groups[target]):
        return None
    return _refitted(tools, genome, tuple(groups), genome.gpus, {source, target}, rng)


def merge_groups(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Make one group of two; None with one group or where async mode forbids it."""
    count = len(genome.grouping)
    if count < 2:
        return None
    a, b = sorted(rng.pair(count))
    merged = tuple(sorted((*genome.grouping[a], *genome.grouping[b]), key=_position))
    if not _is_allowed(tools, merged):
        return None
    groups = [merged if index == a else tasks for index, tasks in enumerate(genome.grouping) if index != b]
    joined = tuple(sorted((*genome.gpus[a], *genome.gpus[b])))
    gpus = [joined if index == a else members for index, members in enumerate(genome.gpus) if index != b]
    return _refitted(tools, genome, tuple(groups), tuple(gpus), {a}, rng)


def split_group(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Cut a group of several tasks in two, with machines in proportion to their work; None where none can be cut."""
    wide = [g for g, tasks in enumerate(genome.grouping) if len(tasks) > 1 and len(genome.gpus[g]) > 1]
    if not wide:
        return None
    group = wide[rng.below(len(wide))]
    tasks = genome.grouping[group]
    left = tuple(task for task in tasks if rng.random() < 0.5)
    if len(left) in {0, len(tasks)}:
        return None
    right = tuple(task for task in tasks if task not in left)
    order = tools.problem.order.chain_rank
    machine_of = tools.problem.machine_of
    members = sorted(genome.gpus[group], key=lambda gpu: (order[machine_of[gpu]], gpu))
    if rng.random() < 0.5:
        members.reverse()
    work = tools.problem.work
    share = sum(work[task] for task in left) / sum(work[task] for task in tasks)
    cut = min(len(members) - 1, max(1, round(len(members) * share)))
    groups = (*genome.grouping[:group], left, *genome.grouping[group + 1 :], right)
    gpus = (*genome.gpus[:group], tuple(sorted(members[:cut])), *genome.gpus[group + 1 :], tuple(sorted(members[cut:])))
    return _refitted(tools, genome, groups, gpus, {group, len(groups) - 1}, rng)


def refit(tools: SearchTools, genome: Genome, rng: Draws) -> Genome | None:
    """Give one task the next layouts of its ranking; None where it has none."""
    tasks = list(genome.layouts)
    task = tasks[rng.below(len(tasks))]
    group = genome.group_of(task)
    ranked = tools.ranker.ranked(task, genome.gpus[group], genome.grouping[group], deep=True)
    if not ranked.entries:
        return None
    # Faster layouts are likelier: squaring a uniform draw favours the front of the list.
    layout = ranked.layout(int(len(ranked.entries) * rng.random() ** 2))
    return None if layout == genome.layouts[task] else genome.with_layout(task, layout)


#: Move and relative weight.
REGROUP_MOVES: tuple[tuple[Move, float], ...] = (
    (move_gpus, 0.25),
    (exchange_and_refit, 0.15),
    (swap_groups, 0.05),
    (swap_tasks, 0.10),
    (refit, 0.25),
    (move_task, 0.10),
    (merge_groups, 0.05),
    (split_group, 0.10),
)


def _refitted(
    tools: SearchTools,
    genome: Genome,
    grouping: Grouping,
    gpus: tuple[tuple[int, ...], ...],
    touched: set[int],
    rng: Draws,
) -> Genome:
    """Return the candidate with new layouts in the groups touched: the same recipes, or now and then ranked anew."""
    layouts = dict(genome.layouts)
    anew = rng.random() < RANK_SHARE
    for index in sorted(touched):
        rebuilt = None if anew else _rebuilt(tools, genome, grouping[index], gpus[index])
        layouts.update(tools.seeder.fit_group(grouping[index], gpus[index], deep=True) if rebuilt is None else rebuilt)
    return Genome(grouping, gpus, layouts)


def _rebuilt(
    tools: SearchTools, genome: Genome, tasks: tuple[RlTask, ...], gpus: tuple[int, ...]
) -> dict[RlTask, TaskLayout] | None:
    """Return the tasks' recipes on other GPUs; None where a task has none or it does not apply."""
    layouts = {}
    for task in tasks:
        recipe = genome.layouts[task].recipe
        layout = None if recipe is None else tools.ranker.guesses(task, gpus).build(recipe)
        if layout is None:
            return None
        layouts[task] = replace(layout, split=genome.layouts[task].split)
    return layouts


def _is_allowed(tools: SearchTools, tasks: tuple[RlTask, ...]) -> bool:
    is_async = tools.problem.workflow.mode is Mode.ASYNC
    return not (is_async and len(tasks) > 1 and RlTask.ACTOR_GENERATION in tasks)


def _position(task: RlTask) -> int:
    return list(RlTask).index(task)
