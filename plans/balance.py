"""The three load-balancing strategies of HetRL, as pure functions of unit costs (rules reconstructed, hetrl.md 10).

(a) samples per replica of generation, (b) dispatch of samples of known length to replicas, (c) layers per pipeline
stage. Each minimises the largest finish time; ties are broken by the lower index, so results are deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from plans.errors import InfeasibleError


def proportional_shares(total: int, weights: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Return whole shares in proportion to weights, by largest remainder, each at least `least`.

    Args:
        total: what is shared out; at least `least` times the number of weights.
        weights: positive weights [n].
        least: smallest share.

    Raises:
        InfeasibleError: `total` is too small.
    """
    spare = total - least * len(weights)
    if spare < 0:
        raise InfeasibleError(
            f"{total} cannot be shared among {len(weights)} with at least {least} each; use fewer shares."
        )
    weight_sum = math.fsum(weights)
    # Aim at the proportional share of the total; those below `least` are lifted first.
    exact = [max(0.0, total * weight / weight_sum - least) for weight in weights]
    scale = spare / math.fsum(exact) if math.fsum(exact) > 0 else 0.0
    exact = [scale * value for value in exact]
    floors = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (floors[i] - exact[i], i))
    for i in order[: spare - sum(floors)]:
        floors[i] += 1
    floors[order[0]] += spare - sum(floors)
    return tuple(least + value for value in floors)


def balance_samples(
    total: int,
    num_replicas: int,
    finish_s: Callable[[int, int], float],
    *,
    unit: int = 1,
    max_moves: int = 10_000,
) -> tuple[int, ...]:
    """Return samples per replica that minimise the slowest replica's finish time (strategy a).

    Starts in proportion to speed and moves single units from the slowest replica to the one that would finish
    first, while that lowers the slowest. Where finish times are non-decreasing in the samples and `unit` is 1 the
    end is an optimum: a better one would need fewer samples on the slowest, hence one more on some other, which
    would then finish no earlier than the slowest does now.

    Args:
        total: samples to share; what is left over by `unit` goes to the replica that then finishes first.
        num_replicas: replicas; each gets at least one unit.
        finish_s: seconds of a replica (index, samples); non-decreasing in samples.
        unit: granularity of the search in samples; 1 = exact.
        max_moves: bound of the refinement.

    Raises:
        InfeasibleError: fewer samples than replicas.
    """
    if unit > 1 and total < unit * num_replicas:
        unit = 1
    units, remainder = divmod(total, unit)
    probe = max(1, units // num_replicas) * unit
    speeds = [1.0 / max(finish_s(i, probe), 1e-300) for i in range(num_replicas)]
    shares = list(proportional_shares(units, speeds))
    times = [finish_s(i, share * unit) for i, share in enumerate(shares)]
    for _ in range(max_moves):
        slowest = max(range(num_replicas), key=times.__getitem__)
        if shares[slowest] == 1:
            break
        after = [math.inf if i == slowest else finish_s(i, (shares[i] + 1) * unit) for i in range(num_replicas)]
        receiver = min(range(num_replicas), key=after.__getitem__)
        if after[receiver] >= times[slowest]:
            break
        shares[slowest] -= 1
        shares[receiver] += 1
        times[slowest] = finish_s(slowest, shares[slowest] * unit)
        times[receiver] = after[receiver]
    samples = [share * unit for share in shares]
    if remainder:
        after = [finish_s(i, samples[i] + remainder) for i in range(num_replicas)]
        samples[min(range(num_replicas), key=after.__getitem__)] += remainder
    return tuple(samples)


def sequence_weight(length: float, linear: float, quadratic: float) -> float:
    """Return the work of a sample of n tokens: linear * n + quadratic * n^2 (weights and attention)."""
    return linear * length + quadratic * length * length


def dispatch_by_length(
    lengths: Sequence[int],
    speeds: Sequence[float],
    *,
    linear: float,
    quadratic: float,
    token_caps: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return sample indices per replica: longest first, each to the replica that would finish it soonest (b).

    LPT on related machines, with an optional cap of tokens per replica (memory). Long samples therefore go to fast
    replicas. Never worse than twice the optimum without caps. O(n log n + n r).

    Args:
        lengths: tokens of each sample [n].
        speeds: relative speed of each replica [r], > 0.
        linear: work per token.
        quadratic: work per squared token.
        token_caps: most tokens that each replica may hold [r]; absent = no cap.

    Raises:
        InfeasibleError: a sample fits on no replica any more.
    """
    caps = [math.inf] * len(speeds) if token_caps is None else [float(cap) for cap in token_caps]
    loads, tokens = [0.0] * len(speeds), [0.0] * len(speeds)
    chosen: list[list[int]] = [[] for _ in speeds]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        work = sequence_weight(lengths[index], linear, quadratic)
        open_replicas = [r for r in range(len(speeds)) if tokens[r] + lengths[index] <= caps[r]]
        if not open_replicas:
            held = [int(count) for count in tokens]
            raise InfeasibleError(
                f"sample {index} of {lengths[index]} tokens fits on no replica: their token caps are "
                f"{list(token_caps or ())} and they hold {held}; raise the caps or use more replicas."
            )
        best = min(open_replicas, key=lambda r: ((loads[r] + work) / speeds[r], r))
        loads[best] += work
        tokens[best] += lengths[index]
        chosen[best].append(index)
    return tuple(tuple(sorted(indices)) for indices in chosen)


def balance_layers(
    num_layers: int,
    layer_s: Sequence[float],
    *,
    fixed_s: Sequence[float] | None = None,
    caps: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return layers per pipeline stage that minimise the slowest stage, n_j * layer_s[j] + fixed_s[j] (strategy c).

    Exact: stage times are linear in their layers, so giving each next layer to the stage that would then finish
    first minimises the maximum. O(layers log stages).

    Args:
        num_layers: layers of the model.
        layer_s: seconds per layer of each stage [p], >= 0.
        fixed_s: seconds of each stage that do not depend on its layers (transfers, head) [p].
        caps: most layers that each stage's memory holds [p].

    Raises:
        InfeasibleError: fewer layers than stages, or the caps hold fewer layers than the model has.
    """
    stages = len(layer_s)
    extra = list(fixed_s) if fixed_s is not None else [0.0] * stages
    limit = list(caps) if caps is not None else [num_layers] * stages
    if num_layers < stages or min(limit) < 1 or sum(limit) < num_layers:
        raise InfeasibleError(
            f"{num_layers} layers cannot be cut into {stages} stages that hold at most {limit} layers; "
            "use fewer stages or GPUs with more memory."
        )
    shares = _certain_layers(num_layers, layer_s, extra, limit)
    heap = [((shares[j] + 1) * layer_s[j] + extra[j], j) for j in range(stages) if limit[j] > shares[j]]
    heapq.heapify(heap)
    for _ in range(num_layers - sum(shares)):
        _, j = heapq.heappop(heap)
        shares[j] += 1
        if shares[j] < limit[j]:
            heapq.heappush(heap, ((shares[j] + 1) * layer_s[j] + extra[j], j))
    return tuple(shares)


def _certain_layers(
    num_layers: int, layer_s: Sequence[float], extra: Sequence[float], limit: Sequence[int]
) -> list[int]:
    """Return layers that the greedy rule of `balance_layers` gives in any case: those that end before a fluid cut.

    The rule takes layers in the order of their finish times, so it takes every layer that ends before a time at which
    no more than `num_layers` of them end. One layer per stage where that can't be told.
    """
    ones = [1] * len(layer_s)
    if not all(0.0 < seconds < math.inf for seconds in layer_s):
        return ones
    rate = math.fsum([1.0 / seconds for seconds in layer_s])
    cut = (num_layers + math.fsum([e / s for e, s in zip(extra, layer_s, strict=True)])) / rate * (1.0 - 1e-9)
    shares = [max(1, min(most, math.floor((cut - e) / s))) for e, s, most in zip(extra, layer_s, limit, strict=True)]
    return shares if sum(shares) <= num_layers else ones
