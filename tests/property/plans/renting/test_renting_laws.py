"""Laws of the estimate that ranks sets of machines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans.renting.estimate import OfferRates

RATE = st.floats(0.01, 100.0)


@st.composite
def rates_and_counts(draw):
    number = draw(st.integers(1, 4))
    generation = np.array(draw(st.lists(RATE, min_size=number, max_size=number)))
    consumption = np.array(draw(st.lists(RATE, min_size=number, max_size=number)))
    counts = np.array(draw(st.lists(st.integers(0, 5), min_size=number, max_size=number)))
    return OfferRates(generation, consumption, overlaps=True), counts


@given(rates_and_counts(), st.data())
def test_more_machines_never_lower_the_estimate(case, data):
    rates, counts = case
    more = counts.copy()
    more[data.draw(st.integers(0, len(counts) - 1))] += 1
    fewer_s, more_s = rates.throughput(np.array([counts, more]))
    assert more_s >= fewer_s * (1 - 1e-9)


@given(rates_and_counts())
def test_estimate_equals_the_best_split_into_fine_parts(case):
    rates, counts = case
    # The linear program by brute force over vertices: one offer is shared, the others are whole.
    best = 0.0
    number = len(counts)
    g, c = counts * rates.generation, counts * rates.consumption
    for shared in range(number):
        others = [i for i in range(number) if i != shared]
        for mask in range(2 ** len(others)):
            producing = [i for bit, i in enumerate(others) if mask >> bit & 1]
            produced, consumed = g[producing].sum(), c[others].sum() - c[producing].sum()
            total = g[shared] + c[shared]
            part = min(1.0, max(0.0, (consumed + c[shared] - produced) / total)) if total > 0 else 0.0
            best = max(best, min(produced + part * g[shared], consumed + (1 - part) * c[shared]))
    assert rates.throughput(np.array([counts]))[0] == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(rates_and_counts(), st.floats(0.1, 10.0))
def test_estimate_scales_with_the_rates(case, factor):
    rates, counts = case
    scaled = OfferRates(rates.generation * factor, rates.consumption * factor, overlaps=True)
    rows = np.array([counts])
    assert scaled.throughput(rows)[0] == pytest.approx(factor * rates.throughput(rows)[0])
