"""Fast cost of one task on a compact placement: the numbers of `plans.cost.task_cost`, once per distinct replica.

Replicas on the same machines with the same layers cost the same per sample, micro-batch and decode step, so a
replica is priced from a kept profile, and equal replicas once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plans.cost.cache import BoundedCache
from plans.cost.collectives import LinkTimes
from plans.cost.lineup import Lineup, Row, Site
from plans.cost.sharing import fullest_link_s
from plans.cost.terms import DecodeTerms, TaskTerms
from plans.spec.cluster import ClusterView

#: Sequences decoded together that layer splits of generation assume.
TYPICAL_BATCH = 64.0
#: Profiles kept per pair of degrees after which they are forgotten: bounds memory in long searches.
PROFILE_LIMIT = 20_000


class _Chip(NamedTuple):
    """What the formulas need of a stage's site."""

    flop_per_s: float
    hbm_bytes_per_s: float
    overhead_s: float
    machines: tuple[int, ...]
    """Sorted machines of its GPUs [tp]."""
    places: frozenset[int]
    ring_s: float
    """One all-reduce of a micro-batch over the best ring."""
    layer_s: float
    """Rough seconds per layer and sample, for layer shares."""
    head_s: float
    """Rough seconds of the vocabulary head per sample, for layer shares; 0 in paper mode."""


class _Profile:
    """Seconds of a replica's stages, per unit of what they are in proportion to."""

    __slots__ = ("chips", "decode", "flow_link_s", "flow_sample_s", "link_s", "sample_s", "unit_s")

    def __init__(self, chips: list[_Chip], sample_s: list[float], link_s: list[float], mbs: int) -> None:
        self.chips = chips
        self.sample_s = sample_s
        """Compute seconds per sample [pp]."""
        self.link_s = link_s
        """TP and PP seconds per micro-batch [pp]."""
        self.unit_s = max([mbs * c + t for c, t in zip(sample_s, link_s, strict=True)])
        """Slowest stage per full micro-batch, decoding left out."""
        self.flow_sample_s = sum(sample_s[1:])
        self.flow_link_s = sum(link_s[1:])
        self.decode: dict[int, list[float]] = {}
        """Seconds per decode step [pp], by decode batch."""


class _Table(NamedTuple):
    """What is kept for one micro-batch size and TP degree."""

    micro_batch_size: int
    tp: int
    chips: dict[Site, _Chip]
    profiles: BoundedCache[tuple[Row, tuple[int, ...]], _Profile]


class FastTaskPricer:
    """Prices placements of one task, or of several with equal constants."""

    def __init__(self, view: ClusterView, links: LinkTimes, terms: TaskTerms) -> None:
        self.links = links
        self.terms = terms
        # Lists: reading single elements of them is several times faster than of arrays. GPUs of a machine are alike.
        first = view.machine_of.searchsorted(range(len(view.machine_names)))
        self._flop_per_s: list[float] = terms.compute_flop_per_s[first].tolist()
        self._hbm_bytes_per_s: list[float] = terms.hbm_bytes_per_s[first].tolist()
        self._overhead_s: list[float] = [] if terms.decode is None else terms.decode.layer_overhead_s[first].tolist()
        self._tables: dict[tuple[int, int], _Table] = {}
        self._tails: dict[int, float] = {}

    def task_s(
        self,
        lineup: Lineup,
        layers: tuple[int, ...],
        micro_batch_size: int,
        samples: Sequence[int],
        batches: Sequence[int],
    ) -> float:
        """Return the cost of the task.

        Args:
            lineup: where its stages are.
            layers: layers per stage [pp].
            micro_batch_size: samples per micro-batch.
            samples: samples per replica [dp].
            batches: decode batch per replica [dp] of generation; empty for other tasks.
        """
        table = self._table(micro_batch_size, lineup.tp)
        if batches:
            decoding = set(zip(lineup.rows, samples, batches, strict=True))
            return max([self._replica_s(table, row, layers, count, batch) for row, count, batch in decoding])
        distinct = set(zip(lineup.rows, samples, strict=True))
        slowest = max([self._replica_s(table, row, layers, count, 1) for row, count in distinct])
        return slowest + self._gradient_s(lineup, layers) if self.terms.is_training else slowest

    def replica_s(
        self, row: Row, layers: tuple[int, ...], micro_batch_size: int, tp: int, samples: int, batch: int
    ) -> float:
        """Return the seconds of one replica, without the gradient all-reduce."""
        return self._replica_s(self._table(micro_batch_size, tp), row, layers, samples, batch)

    def stage_totals(
        self, row: Row, layers: tuple[int, ...], micro_batch_size: int, tp: int, samples: int, batch: int
    ) -> tuple[float, ...]:
        """Return the seconds of each stage of one replica."""
        table = self._table(micro_batch_size, tp)
        return tuple(self._stage_totals(table, self._profile(table, row, layers), layers, samples, batch))

    def unit_s(self, row: Row, layers: tuple[int, ...], micro_batch_size: int, tp: int, batch: int) -> float:
        """Return the seconds per sample of one replica with many samples: its slowest stage."""
        table = self._table(micro_batch_size, tp)
        profile, decode = self._profile(table, row, layers), self.terms.decode
        if decode is None:
            return profile.unit_s / micro_batch_size
        steps = decode.lengths.response / batch
        parts = zip(profile.sample_s, profile.link_s, self._decode_s(profile, decode, layers, tp, batch), strict=True)
        return max([c + t / micro_batch_size + steps * s for c, t, s in parts])

    def shares_s(self, site: Site, micro_batch_size: int, tp: int) -> tuple[float, float]:
        """Return rough seconds per sample of a layer and of the head on a stage: compute, TP ring, typical decoding."""
        chip = self._chip(self._table(micro_batch_size, tp), site)
        return chip.layer_s, chip.head_s

    def _table(self, micro_batch_size: int, tp: int) -> _Table:
        table = self._tables.get((micro_batch_size, tp))
        if table is None:
            table = _Table(micro_batch_size, tp, {}, BoundedCache(PROFILE_LIMIT))
            self._tables[micro_batch_size, tp] = table
        return table

    def _replica_s(self, table: _Table, row: Row, layers: tuple[int, ...], samples: int, batch: int) -> float:
        """Return slowest stage + bubble."""
        terms, mbs = self.terms, table.micro_batch_size
        profile = table.profiles.get((row, layers)) or self._profile(table, row, layers)
        micro_batches = -(-samples // mbs)
        counted = micro_batches * mbs if terms.pads_micro_batches else samples
        if terms.decode is None and counted == micro_batches * mbs:
            slowest = micro_batches * profile.unit_s
        else:
            slowest = max(self._stage_totals(table, profile, layers, samples, batch))
        if not terms.has_bubble or len(layers) == 1:
            return slowest
        flow = counted * profile.flow_sample_s + micro_batches * profile.flow_link_s
        return slowest + terms.updates * flow / micro_batches

    def _stage_totals(
        self, table: _Table, profile: _Profile, layers: tuple[int, ...], samples: int, batch: int
    ) -> list[float]:
        terms, mbs = self.terms, table.micro_batch_size
        micro_batches = -(-samples // mbs)
        counted = micro_batches * mbs if terms.pads_micro_batches else samples
        parts = zip(profile.sample_s, profile.link_s, strict=True)
        totals = [counted * c + micro_batches * t for c, t in parts]
        if terms.decode is None:
            return totals
        steps = terms.decode.lengths.response * counted / batch + self._tail(terms.decode, batch)
        seconds = self._decode_s(profile, terms.decode, layers, table.tp, batch)
        return [total + steps * s for total, s in zip(totals, seconds, strict=True)]

    def _tail(self, decode: DecodeTerms, batch: int) -> float:
        """Return the decode steps of the last wave's tail."""
        tail = self._tails.get(batch)
        if tail is None:
            tail = self._tails[batch] = decode.steps(0.0, batch)
        return tail

    def _profile(self, table: _Table, row: Row, layers: tuple[int, ...]) -> _Profile:
        profile = table.profiles.get((row, layers))
        if profile is None:
            profile = self._make_profile(table, row, layers)
            table.profiles.put((row, layers), profile)
        return profile

    def _make_profile(self, table: _Table, row: Row, layers: tuple[int, ...]) -> _Profile:
        terms, tp = self.terms, table.tp
        chips = [table.chips.get(site) or self._chip(table, site) for site in row]
        last, num_bytes = len(row) - 1, terms.pp_bytes(table.micro_batch_size)
        sample_s, link_s = [], []
        for j, (chip, count) in enumerate(zip(chips, layers, strict=True)):
            flop = count * terms.layer_flop + (terms.head_flop if j == last else 0.0)
            sample_s.append(terms.passes * flop / (chip.flop_per_s * tp))
            seconds = terms.tp_count * count * chip.ring_s
            if j < last:
                seconds += terms.pp_count * self._pair_s(row[j], row[j + 1], chip, chips[j + 1], num_bytes)
            link_s.append(seconds)
        return _Profile(chips, sample_s, link_s, table.micro_batch_size)

    def _pair_s(self, first: Site, second: Site, chip: _Chip, following: _Chip, num_bytes: float) -> float:
        if isinstance(first, int) and isinstance(second, int):
            return self.links.edge_s(first, second, num_bytes)
        return self.links.pair_s(chip.places, following.places, num_bytes)

    def _chip(self, table: _Table, site: Site) -> _Chip:
        chip = table.chips.get(site)
        if chip is None:
            chip = table.chips[site] = self._make_chip(site, table.micro_batch_size, table.tp)
        return chip

    def _make_chip(self, site: Site, mbs: int, tp: int) -> _Chip:
        terms = self.terms
        machines = (site,) * tp if isinstance(site, int) else site
        places = frozenset(machines)
        flop_per_s = min([self._flop_per_s[machine] for machine in places])
        hbm = min([self._hbm_bytes_per_s[machine] for machine in places])
        ring_s = 0.0 if tp == 1 else self.links.ring_s(machines, terms.tp_bytes(mbs, tp))
        layer_s = terms.passes * terms.layer_flop / (flop_per_s * tp) + terms.tp_count / mbs * ring_s
        head_s = terms.passes * terms.head_flop / (flop_per_s * tp)
        if terms.decode is not None:
            # One sequence of a decode batch of typical size; only the relation between stages matters.
            steps = terms.decode.lengths.response / TYPICAL_BATCH
            layer_s += steps * terms.decode.layer_bytes / (hbm * tp)
            head_s += steps * terms.decode.head_bytes / (hbm * tp)
        overhead_s = max([self._overhead_s[machine] for machine in places]) if self._overhead_s else 0.0
        return _Chip(flop_per_s, hbm, overhead_s, machines, places, ring_s, layer_s, head_s)

    def _decode_s(
        self, profile: _Profile, decode: DecodeTerms, layers: tuple[int, ...], tp: int, batch: int
    ) -> list[float]:
        """Return seconds per decode step of each stage, all groups of the batch included."""
        seconds = profile.decode.get(batch)
        if seconds is None:
            seconds = profile.decode[batch] = self._make_decode_s(profile.chips, decode, layers, tp, batch)
        return seconds

    def _make_decode_s(
        self, chips: Sequence[_Chip], decode: DecodeTerms, layers: tuple[int, ...], tp: int, batch: int
    ) -> list[float]:
        groups, last, found = decode.groups(len(chips)), len(chips) - 1, []
        share_bytes = batch / groups * decode.token_bytes
        for j, (chip, count) in enumerate(zip(chips, layers, strict=True)):
            seconds = _decode_step_s(decode, chip, count, batch, tp, groups, is_last=j == last)
            if decode.tp_count:
                if tp > 1:
                    ring = self.links.ring_s(chip.machines, share_bytes * (2.0 * (tp - 1) / tp))
                    seconds += groups * decode.tp_count * count * ring
                if j < last:
                    seconds += groups * self.links.pair_s(chip.places, chips[j + 1].places, share_bytes)
            found.append(seconds)
        return found

    def _gradient_s(self, lineup: Lineup, layers: tuple[int, ...]) -> float:
        """Return C_dp: the slowest gradient ring of any stage and shard."""
        replicas, tp = len(lineup.rows), lineup.tp
        if replicas == 1:
            return 0.0
        # The shards of local stages have equal rings; a shard recurs once per replica.
        shards, width = 1 if lineup.is_local else tp, len(layers) * tp
        terms, ring_s, last = self.terms, self.links.ring_s, len(layers) - 1
        rings: dict[tuple[tuple[int, ...], float], int] = {}
        for j, count in enumerate(layers):
            weights = terms.stage_gradient_bytes(count, is_first=j == 0, is_last=j == last)
            num_bytes = terms.dp_bytes(weights, replicas, tp)
            for rank in range(j * tp, j * tp + shards):
                ring = tuple(sorted(lineup.machines[rank::width])), num_bytes
                rings[ring] = rings.get(ring, 0) + tp // shards
        slowest = max([ring_s(machines, num_bytes) for machines, num_bytes in rings])
        if terms.shares_links:
            slowest = max(slowest, fullest_link_s(self.links, rings))
        return terms.updates * slowest


def _decode_step_s(
    decode: DecodeTerms, chip: _Chip, num_layers: int, batch: int, tp: int, groups: int, *, is_last: bool
) -> float:
    weights = groups * (num_layers * decode.layer_bytes + (decode.head_bytes if is_last else 0.0)) / tp
    cache = batch * num_layers * decode.cache_bytes / min(tp, decode.kv_heads)
    memory_s = (weights + cache) / chip.hbm_bytes_per_s
    work = batch * (num_layers * decode.layer_flop + (decode.head_flop if is_last else 0.0)) / tp
    compute_s = work / chip.flop_per_s
    return max(memory_s, compute_s) + groups * num_layers * chip.overhead_s
