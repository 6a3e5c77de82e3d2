"""Fast seconds of a weight transfer between compact placements: the numbers of `plans.cost.transfer`, by arrays.

What a receiver takes depends only on its place in its replica (its part), what that costs only on the machines. So
pulls are worked out once per part, receiving machine and kind of training replica, all of them together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plans.cost.cache import BoundedCache
from plans.cost.collectives import LinkTimes
from plans.cost.compact import CompactTask
from plans.cost.model import CostModel, Fanout
from plans.cost.transfer import CLEARLY_LESS, WeightLine, per_region_s, sequential_s
from plans.spec.cluster import ClusterView, FloatArray, IntArray

#: Pieces of weights kept, by degrees and layers of both placements.
PIECES_KEPT = 2_000
#: No replica: above every index.
_NO_REPLICA = np.iinfo(np.int64).max


class _Parts(NamedTuple):
    """What the tasklets of one generation replica take from those of one training replica.

    A tasklet is numbered inside its replica, stage by stage, shard by shard; k is the most pieces that a part has.
    """

    source: IntArray
    """Training tasklet of each piece [parts, k]; 0 where a part has fewer."""
    num_bytes: FloatArray
    """Bytes of each piece [parts, k]."""
    is_piece: NDArray[np.bool_]
    """Whether there is such a piece [parts, k]."""
    column: IntArray
    """Piece of a part that a training tasklet sends [parts, tasklets]; -1 = none."""


class _Senders(NamedTuple):
    """Training replicas; those on the same machines are alike as senders, so the first of each kind serves."""

    machines: IntArray
    """Machine of each tasklet [kinds, tasklets]."""
    first: IntArray
    """First replica of each kind [kinds], ascending."""
    kind: IntArray
    """Kind of each replica [dp]."""


class _Pulls(NamedTuple):
    """Pulls of receivers, and what they keep the senders busy with."""

    seconds: FloatArray
    """Seconds of each pull [n]."""
    replica: IntArray
    """Training replica that serves it [n]."""
    source: IntArray
    """Training tasklet of each piece [n, k]."""
    busy: FloatArray
    """Seconds of each piece, times the receivers with this pull [n, k]."""


class FastTransfer:
    """Transfers between placements of actor training and generation on one cluster."""

    def __init__(self, line: WeightLine, view: ClusterView, links: LinkTimes, model: CostModel) -> None:
        self._line, self._view, self.links, self._model = line, view, links, model
        self._machine_of: IntArray = view.machine_of.astype(np.int64)
        self._num_machines = len(view.machine_names)
        self._latency_s, self._s_per_byte = links.latency_s.ravel(), links.s_per_byte.ravel()
        self._parts: BoundedCache[Hashable, _Parts] = BoundedCache(PIECES_KEPT)

    def seconds(self, training: CompactTask, generation: CompactTask) -> float:
        """Return C_reshard or C_sync."""
        if training.grid_key == generation.grid_key:
            return 0.0
        home = np.full(self._view.num_gpus, -1)
        home[training.flat] = np.arange(training.flat.size)
        homes = home.take(generation.flat)
        return self._model.sync_factor * self._moved_s(training, generation, homes)

    def _moved_s(self, training: CompactTask, generation: CompactTask, homes: IntArray) -> float:
        if _is_nested(training, generation, homes):
            if training.gpus.shape[1:] == generation.gpus.shape[1:]:  # only the order differs
                return self._direct_s(training, generation, homes, 1.0)
            return self._reshard_s(training, generation)
        fraction = self._model.delta_fraction
        if self._model.fanout is Fanout.DIRECT or int(np.maximum.reduce(homes)) >= 0:
            return self._direct_s(training, generation, homes, fraction)
        senders, receivers = (
            np.unique(self._machine_of.take(placement.flat)).tolist() for placement in (training, generation)
        )
        num_bytes = self._line.total_bytes * fraction
        if self._model.fanout is Fanout.SEQUENTIAL:
            return sequential_s(self.links, senders, receivers, num_bytes)
        return per_region_s(self.links, self._view.region_of_machine.tolist(), senders, receivers, num_bytes)

    def _reshard_s(self, training: CompactTask, generation: CompactTask) -> float:
        """Return the slowest ring of a micro-DP group, or of a training replica where degrees do not divide."""
        p, t, p_g, t_g = training.pp, training.tp, generation.pp, generation.tp
        if t % t_g or p % p_g:
            volume, height, width = self._line.total_bytes * (t * p - 1) / (t * p), p, t
        else:
            volume = self._line.total_bytes * (t * p - t_g * p_g) / (t_g * p_g * t * p)
            height, width = p // p_g, t // t_g
        machines = self._machine_of.take(training.flat)
        blocks = machines.reshape(training.dp, p // height, height, t // width, width).transpose(0, 1, 3, 2, 4)
        rings = set(map(tuple, np.sort(blocks.reshape(-1, height * width), axis=1).tolist()))
        return max([self.links.ring_s(ring, volume) for ring in rings])

    def _direct_s(self, training: CompactTask, generation: CompactTask, homes: IntArray, fraction: float) -> float:
        """Return max(slowest receiver, busiest sender) when every tasklet pulls from its cheapest replica."""
        tasklets = training.pp * training.tp
        parts, senders = self._parts_of(training, generation, fraction), self._senders(training)
        part = np.arange(generation.flat.size) % (generation.pp * generation.tp)
        place = part * self._num_machines + self._machine_of.take(generation.flat)
        (holders,) = (homes >= 0).nonzero()
        # A GPU that trains is like any other where it holds nothing of what it needs.
        holders = holders[parts.column[part[holders], homes[holders] % tasklets] >= 0]
        num_places = len(parts.source) * self._num_machines
        every = np.bincount(place, minlength=num_places)
        (places,) = every.nonzero()
        empty = (every - np.bincount(place[holders], minlength=num_places))[places]
        pieces = self._pieces(parts, senders, places)
        pulls = [_pulls_of_empty(pieces, senders, empty)] if empty.any() else []
        if len(holders):
            at = places.searchsorted(place[holders])
            column = parts.column[part[holders], homes[holders] % tasklets]
            pulls.append(_pulls_of_holders(pieces, senders, at, homes[holders] // tasklets, column))
        slowest = max([float(np.maximum.reduce(pull.seconds)) for pull in pulls])
        sent = np.bincount(
            np.concatenate([(pull.replica[:, None] * tasklets + pull.source).ravel() for pull in pulls]),
            np.concatenate([pull.busy.ravel() for pull in pulls]),
        )
        return max(slowest, float(np.maximum.reduce(sent)))

    def _pieces(self, parts: _Parts, senders: _Senders, places: IntArray) -> _Pieces:
        """Return the pieces that receivers at (part, machine) `places` [n] would take from each kind of sender."""
        part, machine = np.divmod(places, self._num_machines)
        source = parts.source[part]
        links = senders.machines[:, source] * self._num_machines + machine[:, None]
        busy = self._latency_s.take(links) + parts.num_bytes[part] * self._s_per_byte.take(links)
        if not parts.is_piece.all():
            busy = np.where(parts.is_piece[part], busy, 0.0)
        return _Pieces(source, busy, np.add.reduce(busy, axis=2))

    def _senders(self, training: CompactTask) -> _Senders:
        machines = self._machine_of.take(training.gpus).reshape(training.dp, -1)
        content, width = machines.tobytes(), machines.itemsize * machines.shape[1]
        kinds: dict[bytes, int] = {}
        kind = [kinds.setdefault(content[at : at + width], len(kinds)) for at in range(0, len(content), width)]
        first = [kind.index(number) for number in range(len(kinds))]
        return _Senders(machines[first], np.array(first), np.array(kind))

    def _parts_of(self, training: CompactTask, generation: CompactTask, fraction: float) -> _Parts:
        key = (training.layers, generation.layers, training.tp, generation.tp, fraction)
        found = self._parts.get(key)
        if found is None:
            found = self._make_parts(training, generation, fraction)
            self._parts.put(key, found)
        return found

    def _make_parts(self, training: CompactTask, generation: CompactTask, fraction: float) -> _Parts:
        shared = np.array(
            [
                [self._line.shared_bytes(receiver, sender) for sender in _intervals(training.layers)]
                for receiver in _intervals(generation.layers)
            ]
        )
        overlap = _overlaps(generation.tp, training.tp) * fraction
        num_bytes = np.einsum("gs,rk->grsk", shared, overlap).reshape(shared.shape[0] * generation.tp, -1)
        most = int((num_bytes > 0.0).sum(axis=1).max())
        # Pieces first, each in the order of the senders.
        source = np.argsort(num_bytes <= 0.0, axis=1, kind="stable")[:, :most]
        taken = np.take_along_axis(num_bytes, source, axis=1)
        column = np.full(num_bytes.shape, -1)
        np.put_along_axis(column, source, np.where(taken > 0.0, np.arange(most), -1), axis=1)
        return _Parts(np.where(taken > 0.0, source, 0), taken, taken > 0.0, column)


class _Pieces(NamedTuple):
    """Pieces of receivers that hold nothing, from each kind of sender."""

    source: IntArray
    """Training tasklet of each piece [n, k]."""
    busy: FloatArray
    """Seconds of each piece [kinds, n, k]."""
    seconds: FloatArray
    """Seconds in sum [kinds, n]."""


def _pulls_of_empty(pieces: _Pieces, senders: _Senders, counts: IntArray) -> _Pulls:
    """Return the pulls of receivers that hold nothing of what they need, `counts` of them at each place [n]."""
    (at,) = counts.nonzero()
    seconds = pieces.seconds[:, at]
    # The first of those that are not clearly slower than the fastest.
    kind = (seconds * CLEARLY_LESS <= np.minimum.reduce(seconds)).argmax(axis=0)
    return _Pulls(
        pieces.seconds[kind, at], senders.first[kind], pieces.source[at], pieces.busy[kind, at] * counts[at, None]
    )


def _pulls_of_holders(pieces: _Pieces, senders: _Senders, at: IntArray, replica: IntArray, column: IntArray) -> _Pulls:
    """Return the pulls of receivers that train in a replica [n] and hold the piece of a column [n] themselves."""
    own_kind, each = senders.kind[replica], np.arange(len(at))
    own_busy = pieces.busy[own_kind, at]
    own_busy[each, column] = 0.0
    own_s, others_s = own_busy.sum(axis=1), pieces.seconds[:, at]
    is_own = senders.first[:, None] == replica
    others_s[is_own] = np.inf
    least = np.minimum(others_s.min(axis=0), own_s)
    first = np.where((others_s * CLEARLY_LESS <= least) & ~is_own, senders.first[:, None], _NO_REPLICA).min(axis=0)
    takes_own = (own_s * CLEARLY_LESS <= least) & (replica < first)
    kind = np.where(takes_own, own_kind, senders.kind[np.where(takes_own, replica, first)])
    return _Pulls(
        np.where(takes_own, own_s, pieces.seconds[kind, at]),
        np.where(takes_own, replica, first),
        pieces.source[at],
        np.where(takes_own[:, None], own_busy, pieces.busy[kind, at]),
    )


def _is_nested(training: CompactTask, generation: CompactTask, homes: IntArray) -> bool:
    """Tell whether both tasks use the same GPUs and every generation replica lies inside one training replica."""
    if len(homes) != training.flat.size or int(homes.min()) < 0:
        return False
    replicas = (homes // (training.pp * training.tp)).reshape(generation.dp, -1)
    return bool((replicas == replicas[:, :1]).all())


def _intervals(layers: Sequence[int]) -> list[tuple[int, int]]:
    found, position = [], 0
    for count in layers:
        found.append((position, position + count))
        position += count
    return found


def _overlaps(receivers: int, senders: int) -> FloatArray:
    """Return the fraction of each matrix that receiver r and sender k of two TP groups share [receivers, senders]."""
    to, of = np.arange(receivers)[:, None], np.arange(senders)
    high = np.minimum((to + 1) / receivers, (of + 1) / senders)
    overlap: FloatArray = np.maximum(0.0, high - np.maximum(to / receivers, of / senders))
    return overlap
