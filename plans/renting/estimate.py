"""Optimistic throughput of a set of machines, fast enough for thousands of sets.

Every GPU generates at the rate of the best replica on its machine and trains at its compute rate, GPUs divide freely
between both, and nothing is lost to links: the rate at which the two sides balance. Sets are ranked by it before the
planner looks at the best ones; it is no proof, since a replica over several machines may beat the best inside one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.cost.evaluator import PlanEvaluator
from plans.cost.model import CostModel
from plans.renting.offers import OfferList
from plans.search.areal_hex.configurations import MOST_BLOCKS, ConfigurationBook
from plans.search.areal_hex.machine_classes import machine_classes
from plans.spec.job import Job, Mode
from plans.workflow import RlTask

FloatArray = NDArray[np.float64]
#: Machines of one kind that a replica may span where one does not hold the model.
SPANNED = MOST_BLOCKS


@dataclass(frozen=True)
class OfferRates:
    """Rates of one machine of each offer."""

    generation: FloatArray
    """Rollouts per second [offers]; 0 where a few machines cannot hold a replica."""
    consumption: FloatArray
    """Samples per second through inference and training [offers]."""
    overlaps: bool
    """Whether both go on at the same time (async)."""

    def throughput(self, counts: NDArray[np.int64]) -> FloatArray:
        """Return the estimated samples per second of sets [S, offers]."""
        generation, consumption = counts * self.generation, counts * self.consumption
        if not self.overlaps:
            both = np.stack([generation.sum(axis=1), consumption.sum(axis=1)])
            serial: FloatArray = np.divide(
                both.prod(axis=0), both.sum(axis=0), out=np.zeros(len(counts)), where=both.min(axis=0) > 0
            )
            return serial
        # Offers turn from training to generation by comparative advantage until both sides are equal.
        order = np.argsort(-self.generation / self.consumption, kind="stable")
        produced, consumed = np.zeros(len(counts)), consumption.sum(axis=1)
        balance: FloatArray = np.minimum(produced, consumed)
        for offer in order:
            g, c = generation[:, offer], consumption[:, offer]
            part = np.divide(consumed - produced, g + c, out=np.zeros(len(counts)), where=g + c > 0)
            part = np.clip(part, 0.0, 1.0)
            balance = np.maximum(balance, np.minimum(produced + part * g, consumed - part * c))
            produced, consumed = produced + g, consumed - c
        return balance


def offer_rates(offers: OfferList, job: Job, model: CostModel) -> OfferRates:
    """Return the rates of every offer under a model."""
    generation, consumption = [], []
    for index, offer in enumerate(offers.offers):
        count = min(SPANNED, offer.machines)
        alone = offers.cluster([count if i == index else 0 for i in range(len(offers.offers))])
        evaluator = PlanEvaluator(alone, job, model)
        classes = machine_classes(alone.view)
        book = ConfigurationBook(evaluator, classes, tail_aware=True, pipelined=True)
        found = book.available({0: offer.gpus_per_machine}, {0: count})
        best = max((1.0 / c.rollout_s / c.shape.num_gpus for c in found), default=0.0)
        generation.append(best * offer.gpus_per_machine)
        consumption.append(_consumption(evaluator) * offer.gpus_per_machine)
    return OfferRates(np.array(generation), np.array(consumption), overlaps=job.mode is Mode.ASYNC)


def _consumption(evaluator: PlanEvaluator) -> float:
    """Return samples per second of one GPU by compute alone."""
    seconds = 0.0
    for task, terms in evaluator.terms.items():
        if task is not RlTask.ACTOR_GENERATION:
            work = terms.passes * (terms.num_layers * terms.layer_flop + terms.head_flop)
            seconds += work / float(terms.compute_flop_per_s[0])
    return 1.0 / seconds
