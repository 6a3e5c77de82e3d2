"""Which machines to rent: the most throughput for a budget, or the least money for a throughput."""

from plans.renting.choose import PlannedSet, Rental, rent_for_throughput, rent_within_budget
from plans.renting.offers import MachineOffer, OfferList, load_offers

__all__ = [
    "MachineOffer",
    "OfferList",
    "PlannedSet",
    "Rental",
    "load_offers",
    "rent_for_throughput",
    "rent_within_budget",
]
