"""Identity and environment of an engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stages.engines.launch import EngineLaunch


def make_launch(**changes: Any) -> EngineLaunch:
    fields: dict[str, Any] = {
        "role": "generation",
        "name": "transformers",
        "run": "r",
        "machine": "m",
        "max_prompt_tokens": 8,
        "max_completion_tokens": 8,
    }
    return EngineLaunch(**{**fields, **changes})


def test_equal_launches_have_one_identity() -> None:
    launch = make_launch(options={"a": 1, "b": 2})
    again = EngineLaunch.model_validate_json(launch.model_dump_json())
    assert again.identity() == launch.identity() == make_launch(options={"b": 2, "a": 1}).identity()
    assert len(launch.identity()) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"role": "scoring"},
        {"run": "other"},
        {"machine": "other"},
        {"gpus": ("m/0",)},
        {"replica": 1},
        {"threads": 2},
        {"dtype": "bf16"},
        {"max_num_seqs": 7},
        {"options": {"tile_rows": 8}},
        {"python": "/other/python"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_changes_the_identity(change: dict[str, Any]) -> None:
    assert make_launch(**change).identity() != make_launch().identity()


def test_environment_bounds_threads_and_hides_other_devices() -> None:
    assert make_launch(threads=3, gpus=("m/2", "m/0")).environment() == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def test_client_side_loads_no_heavy_library() -> None:
    code = (
        "import sys, stages.engines.manager, stages.engines.registry;"
        "heavy = ('torch', 'transformers', 'vllm', 'accelerate', 'uvicorn', 'starlette');"
        "print([module for module in heavy if module in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
