"""Controller that adapts the KL weight so that the measured KL stays near a target."""

from __future__ import annotations


def next_kl_weight(
    weight: float, measured_kl: float, *, target_kl: float, horizon_samples: int, num_samples: int
) -> float:
    """Weight for the next iteration: weight * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon).

    Args:
        weight: Current weight, > 0.
        measured_kl: Mean KL per response of this iteration, nats.
        target_kl: Wanted value, nats, > 0.
        horizon_samples: Responses over which a steady error of 0.2 changes the weight by 20 %.
        num_samples: Responses of this iteration.

    References:
        Ziegler et al. 2019, Fine-tuning language models from human preferences, section 2.2.
    """
    error = min(max(measured_kl / target_kl - 1.0, -0.2), 0.2)
    return weight * (1.0 + error * num_samples / horizon_samples)
