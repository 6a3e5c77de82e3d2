"""Fast seconds of a weight transfer between compact placements: the numbers of `plans.cost.transfer`.

Only the direct transfer is done here: where all TP groups lie inside machines and one TP degree divides the other,
every receiver of a stage on a machine pulls the same bytes over the same links, so pulls are worked out once per
(stage, machine) and receivers are counted. Everything else goes to `transfer_s`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactTask
from plans.cost.model import CostModel, Fanout
from plans.cost.transfer import StageSlots, WeightLine, is_clearly_less, transfer_s
from plans.spec.cluster import ClusterView

Piece = tuple[int, float]
"""A sending stage and the bytes that one of its shards sends to one receiver."""

MachineRow = tuple[int, ...]
"""Machines of a replica's stages [pp], where every TP group lies inside one machine."""


#: Home of a GPU that does not train.
_NOWHERE = (-1, -1, -1)


class _Pull(NamedTuple):
    """A receiver's transfer from one training replica."""

    replica: int
    seconds: float
    busy: list[float]
    """Seconds from one shard of each sending stage."""


class FastTransfer:
    """Transfers between placements of actor training and generation on one cluster."""

    def __init__(self, line: WeightLine, view: ClusterView, links: LinkTimes, model: CostModel) -> None:
        self._line, self._view, self.links, self._model = line, view, links, model
        self._machine_of: list[int] = view.machine_of.tolist()
        self._pieces: dict[tuple[tuple[int, ...], tuple[int, ...], int, int], list[list[Piece]]] = {}

    def seconds(self, training: CompactTask, generation: CompactTask) -> float:
        """Return C_reshard or C_sync."""
        if training.grid_key == generation.grid_key:
            return 0.0
        wide, narrow = max(training.tp, generation.tp), min(training.tp, generation.tp)
        is_regular = wide % narrow == 0 and self._is_local(training) and self._is_local(generation)
        home = np.full(self._view.num_gpus, -1)
        home[training.gpus] = np.arange(training.dp)[:, None, None]
        homes = home[generation.gpus.reshape(generation.dp, -1)]
        apart = bool((homes < 0).all())
        if apart and is_regular and self._model.fanout is Fanout.DIRECT:
            return self._model.sync_factor * _Direct(self, training, generation).apart_s()
        if apart or not is_regular or _is_nested(homes, training):
            return transfer_s(self._line, self._view, self.links, self._model, _slots(training), _slots(generation))
        return self._model.sync_factor * _Direct(self, training, generation).shared_s()

    def rows(self, placement: CompactTask) -> tuple[MachineRow, ...]:
        """Return the machines of a local placement's stages."""
        return cast("tuple[MachineRow, ...]", placement.lineup(self._machine_of).rows)

    def pieces(self, training: CompactTask, generation: CompactTask) -> list[list[Piece]]:
        """Return, for each generation stage, the training stages that it takes from with the bytes per shard pair."""
        key = (training.layers, generation.layers, training.tp, generation.tp)
        found = self._pieces.get(key)
        if found is None:
            width = max(training.tp, generation.tp)
            fraction = self._model.delta_fraction
            senders = list(enumerate(_intervals(training.layers)))
            found = self._pieces[key] = [
                [
                    (source, num_bytes / width * fraction)
                    for source, sender in senders
                    if (num_bytes := self._line.shared_bytes(receiver, sender)) > 0.0
                ]
                for receiver in _intervals(generation.layers)
            ]
        return found

    def _is_local(self, placement: CompactTask) -> bool:
        return placement.lineup(self._machine_of).is_local


class _Direct:
    """One direct transfer: every receiver pulls from its cheapest training replica."""

    def __init__(self, tools: FastTransfer, training: CompactTask, generation: CompactTask) -> None:
        self.tools, self.training, self.generation = tools, training, generation
        self.pieces = tools.pieces(training, generation)
        self.sending, self.receiving = tools.rows(training), tools.rows(generation)
        # Replicas on the same machines are alike as senders: the first one serves.
        self.firsts = {row: index for index, row in reversed(list(enumerate(self.sending)))}
        # A receiver takes from `fan_in` shards of a stage, a shard gives to `fan_out` shards of a stage.
        self.fan_in = max(1, training.tp // generation.tp)
        self.fan_out = max(1, generation.tp // training.tp)
        self.sources = [[source for source, _ in pieces] for pieces in self.pieces]
        self.pulls: dict[tuple[int, int], list[_Pull]] = {}
        self.holder_pulls: dict[tuple[int, int, MachineRow, int, int, bool], _Pull] = {}
        self.order = sorted(self.firsts.values())
        self.sent: dict[tuple[int, int, int], float] = {}

    def apart_s(self) -> float:
        """Return max(slowest receiver, busiest sender) of placements without a common GPU."""
        slowest = 0.0
        sent: dict[tuple[int, int], float] = {}
        for (stage, machine), count in Counter([place for row in self.receiving for place in enumerate(row)]).items():
            best = _first_clearly_best(self._pulls_of(stage, machine))
            slowest = max(slowest, best.seconds)
            for (source, _), busy in zip(self.pieces[stage], best.busy, strict=True):
                place = (best.replica, source)
                sent[place] = sent.get(place, 0.0) + count * self.fan_out * busy
        return max(slowest, max(sent.values()))

    def shared_s(self) -> float:
        """Return the same where some receivers train: what a GPU holds already costs nothing."""
        homes, t, t_g = _homes(self.training), self.training.tp, self.generation.tp
        empty: Counter[tuple[int, int, int]] = Counter()
        slowest = 0.0
        gpus = iter(self.generation.flat.tolist())
        for row in self.receiving:
            for stage, machine in enumerate(row):
                sources = self.sources[stage]
                for rank in range(t_g):
                    own, own_stage, shard = homes.get(next(gpus), _NOWHERE)
                    first = rank * t // t_g
                    if own_stage in sources and first <= shard < first + self.fan_in:
                        pull = self._holder_pull(stage, machine, own, own_stage)
                        slowest = max(slowest, pull.seconds)
                        self._add(pull, sources, first, 1, kept=(own, own_stage, shard))
                    else:
                        empty[stage, machine, rank] += 1
        for (stage, machine, rank), count in empty.items():
            pull = _first_clearly_best(self._pulls_of(stage, machine))
            slowest = max(slowest, pull.seconds)
            self._add(pull, self.sources[stage], rank * t // t_g, count)
        return max(slowest, max(self.sent.values(), default=0.0))

    def _add(
        self, pull: _Pull, sources: list[int], first: int, count: int, kept: tuple[int, int, int] = _NOWHERE
    ) -> None:
        """Add up what the senders of a pull are busy with; the receiver's own shard, `kept`, does not travel."""
        for source, busy in zip(sources, pull.busy, strict=True):
            for shard in range(first, first + self.fan_in):
                place = (pull.replica, source, shard)
                if place != kept:
                    self.sent[place] = self.sent.get(place, 0.0) + count * busy

    def _holder_pull(self, stage: int, machine: int, own: int, own_stage: int) -> _Pull:
        """Return the pull of a receiver that holds a shard of one of the training stages that it takes from."""
        row = self.sending[own]
        key = (stage, machine, row, own_stage, bisect_left(self.order, own), self.firsts[row] == own)
        kept = self.holder_pulls.get(key)
        if kept is None:
            kept = self.holder_pulls[key] = self._make_holder_pull(stage, machine, own, own_stage)
        return kept._replace(replica=own) if kept.replica < 0 else kept

    def _make_holder_pull(self, stage: int, machine: int, own: int, own_stage: int) -> _Pull:
        """Return the best pull, with replica -1 where the receiver's own replica serves it."""
        busy = self._busy(self.sending[own], stage, machine)
        # What it holds is left out of the sum, not subtracted from it, which would lose digits.
        shards = [self.fan_in - (source == own_stage) for source in self.sources[stage]]
        mine = _Pull(own, sum([n * seconds for n, seconds in zip(shards, busy, strict=True)]), busy)
        pulls = [pull for pull in self._pulls_of(stage, machine) if pull.replica != own]
        best = _first_clearly_best(sorted([*pulls, mine]))
        return best._replace(replica=-1) if best is mine else best

    def _busy(self, row: MachineRow, stage: int, machine: int) -> list[float]:
        """Return the seconds from one shard of each sending stage of a training replica to a machine."""
        edge_s = self.tools.links.edge_s
        return [edge_s(row[source], machine, num_bytes) for source, num_bytes in self.pieces[stage]]

    def _pulls_of(self, stage: int, machine: int) -> list[_Pull]:
        """Return the pulls of a receiver that holds nothing, from one replica of each kind, in their order."""
        found = self.pulls.get((stage, machine))
        if found is None:
            found = []
            for row, index in self.firsts.items():
                busy = self._busy(row, stage, machine)
                found.append(_Pull(index, self.fan_in * sum(busy), busy))
            found.sort()
            self.pulls[stage, machine] = found
        return found


def _homes(training: CompactTask) -> dict[int, tuple[int, int, int]]:
    """Return replica, stage and TP rank of each training GPU."""
    return {
        gpu: (i, j, k)
        for i, stages in enumerate(training.stages)
        for j, gpus in enumerate(stages)
        for k, gpu in enumerate(gpus)
    }


def _first_clearly_best(pulls: Sequence[_Pull]) -> _Pull:
    best = pulls[0]
    for pull in pulls[1:]:
        if is_clearly_less(pull.seconds, best.seconds):
            best = pull
    return best


def _is_nested(homes: np.ndarray, training: CompactTask) -> bool:
    """Tell whether both tasks use the same GPUs and every generation replica lies inside one training replica."""
    same = (homes == homes[:, :1]).all() and (homes >= 0).all()
    return bool(same) and homes.size == training.gpus.size


def _intervals(layers: Sequence[int]) -> list[tuple[int, int]]:
    found, position = [], 0
    for count in layers:
        found.append((position, position + count))
        position += count
    return found


def _slots(placement: CompactTask) -> list[StageSlots]:
    return [list(zip(placement.layers, stages, strict=True)) for stages in placement.stages]
