"""The mutations and how often each is drawn (weights are ours: the paper gives none)."""

from __future__ import annotations

from plans.search.mutations.base import Mutation
from plans.search.mutations.change_degrees import change_degrees
from plans.search.mutations.copy_layout import copy_layout
from plans.search.mutations.exchange_machines import exchange_machines
from plans.search.mutations.faster_gpu import faster_gpu
from plans.search.mutations.reorder_columns import reorder_columns
from plans.search.mutations.swap_stages import swap_stages
from plans.search.mutations.swap_tasklets import swap_tasklets

#: Operator and relative weight.
MUTATIONS: tuple[tuple[Mutation, float], ...] = (
    (faster_gpu, 0.15),
    (exchange_machines, 0.20),
    (change_degrees, 0.30),
    (swap_tasklets, 0.10),
    (swap_stages, 0.15),
    (copy_layout, 0.10),
    (reorder_columns, 0.10),
)
