"""Ranks of several machines: a rank's device is that of its place among the ranks of its machine."""

from __future__ import annotations

from dataclasses import replace

from stages.engines.training.rank_place import RankPlace


def test_ranks_of_two_machines_that_alternate():
    places = [RankPlace(rank=rank, num_ranks=4, machines=((0, 2), (1, 3))) for rank in range(4)]

    assert [place.local_rank for place in places] == [0, 0, 1, 1]
    assert [place.local_ranks for place in places] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {place.first_ranks for place in places} == {(0, 1)}


def test_all_ranks_on_one_machine():
    place = RankPlace(rank=2, num_ranks=3)

    assert (place.local_rank, place.local_ranks, place.first_ranks) == (2, (0, 1, 2), (0,))
    assert replace(place, rank=0).local_rank == 0
