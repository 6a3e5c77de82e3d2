"""Section `metrics` of a job: where numbers go beside the iteration record."""

from __future__ import annotations

from stages.spec.section import Section


class MetricsSpec(Section):
    """Outputs for charts."""

    tensorboard: bool = True
    """Also write TensorBoard event files, when the package is installed."""
    quality_report: bool = False
    """Make every iteration a partition of an Airflow asset when it is reported, and have a DAG of its own write a
    quality report on its rollouts."""
