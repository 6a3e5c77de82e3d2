"""Object storage of Motley: layout, commit protocol, rollouts, policies, checkpoints and run records.

Knows neither Airflow nor torch, nor the packages ``plans`` and ``stages``. Import the module that owns the
thing wanted, e.g. ``from storage.rollouts import read_rollouts``.
"""
