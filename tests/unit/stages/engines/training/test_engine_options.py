from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")


from stages.engines.training.engine_options import AccelerateOptions, num_ranks_of, parse_options, settings_of
from stages.engines.training.rank_model import TrainerSettings
from stages.errors import EngineUnavailableError, SpecFaultsError
from tests.helpers.training_cases import training_launch

pytestmark = pytest.mark.engines


def test_parse_options_reports_every_wrong_option():
    with pytest.raises(SpecFaultsError) as caught:
        parse_options(training_launch(precision="fp8", num_processes=0, colour="red"), AccelerateOptions)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "engines.training.options.precision",
        "engines.training.options.num_processes",
        "engines.training.options.colour",
    ]


def test_settings_of_takes_precision_from_the_launch_type():
    launch = training_launch().model_copy(update={"dtype": "bf16", "threads": 3})
    assert settings_of(launch, parse_options(launch, AccelerateOptions), Path("m")) == TrainerSettings(
        model_dir="m", precision="bf16-mixed", serving_dtype="bf16", threads=3
    )


def test_num_ranks_of_is_one_per_gpu():
    launch = training_launch().model_copy(update={"gpus": ("here/0", "here/1")})
    assert num_ranks_of(launch, parse_options(launch, AccelerateOptions)) == 2


def test_num_ranks_of_more_ranks_than_gpus_is_refused():
    launch = training_launch(num_processes=3).model_copy(update={"gpus": ("here/0", "here/1")})
    with pytest.raises(SpecFaultsError, match="num_processes is 3, but the engine has 2"):
        num_ranks_of(launch, parse_options(launch, AccelerateOptions))


def test_settings_of_gpus_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    launch = training_launch().model_copy(update={"gpus": ("here/0",)})
    with pytest.raises(EngineUnavailableError, match="sees no CUDA device"):
        settings_of(launch, parse_options(launch, AccelerateOptions), Path("m"))
