#!/usr/bin/env bash
# Train the quickstart model through a real Airflow on this machine, show the outcome, stop everything.
# Idempotent: an interrupted quickstart goes on where it stopped, a finished one is shown again.
set -euo pipefail
cd "$(dirname "$0")/.."
export MOTLEY_HOME=${MOTLEY_HOME:-$PWD/.motley}
export MOTLEY_ENGINES_PYTHON=${MOTLEY_ENGINES_PYTHON:-$PWD/.venv-engines/bin/python}
motley=.venv/bin/motley
run=quickstart
trap '"$motley" down' EXIT

if [ -e "$MOTLEY_HOME/runs/$run.json" ]; then
    "$motley" resume "$run"
else
    "$motley" run --name "$run" --job examples/quickstart/job.yaml --cluster examples/quickstart/cluster.yaml
fi
"$motley" show "$run"
"$motley" rollouts show "$run" --iteration 0 --worst
