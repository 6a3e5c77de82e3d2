"""Any layout trains as one process does: loss, gradients, weights; and goes on from any other layout's resume point,
which holds the same bytes in all of them.

The reference is the accelerate engine with one rank, which shares nothing with the layouts but the formula of the loss
and is itself compared with plain torch. Layouts are drawn from the seed in the test's id: degrees, layers per stage,
samples per replica, model, loss, micro-batches. The default tier runs a few; `-m slow` runs 200.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engines' environment")
pytest.importorskip("megatron.core", reason="needs the extra megatron")

from stages.engines.megatron.layout import MegatronLayout
from stages.engines.megatron.trainer import MegatronSettings
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec
from tests.helpers.megatron_cases import save_family_model
from tests.helpers.rank_pool import LayoutJob, RankPool
from tests.helpers.tensor_checks import assert_equal_tensors, metrics_of, optimizer_state, tensors_of
from tests.helpers.training_cases import training_engine, training_request, training_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

MOST_RANKS = 4
LAYERS = 5
MODELS = {
    "qwen3 tied": ("qwen3", {"tied": True}),
    "qwen3 odd vocabulary": ("qwen3", {"tied": False, "vocab_size": 19}),
    "llama grouped": ("llama", {"tied": False, "num_key_value_heads": 2}),
    "llama tied odd vocabulary": ("llama", {"tied": True, "vocab_size": 17}),
}
METRICS = (
    "loss",
    "grad_norm",
    "kl",
    "entropy",
    "policy_loss",
    "ratio_mean",
    "importance_weight_mean",
    "sampler_gap_mean",
)


@dataclass(frozen=True)
class Case:
    """What a seed draws."""

    model: str
    layouts: tuple[MegatronLayout, MegatronLayout]
    """Of the first steps, and of those after the reload."""
    settings: dict[str, Any]
    requests: tuple[Any, Any]


def draw_layout(rng: random.Random, model: str) -> MegatronLayout:
    degrees = [
        (tp, pp, dp)
        for tp in ((1, 2) if "grouped" in model else (1, 2, 4))
        for pp in range(1, MOST_RANKS + 1)
        for dp in range(1, MOST_RANKS + 1)
        if 1 < tp * pp * dp <= MOST_RANKS
    ]
    tp, pp, dp = rng.choice(degrees)
    cuts = [0, *sorted(rng.sample(range(1, LAYERS), pp - 1)), LAYERS]
    return MegatronLayout(
        tp=tp,
        stage_layers=tuple(end - start for start, end in pairwise(cuts)),
        shares=tuple(rng.randint(1, 6) for _ in range(dp)),
    )


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    model = rng.choice(sorted(MODELS))
    layouts = (draw_layout(rng, model), draw_layout(rng, model))
    settings = {
        "sequence_parallel": rng.random() < 0.5,
        "is_recomputing": rng.random() < 0.5,
        "logits_chunk_tokens": rng.choice([3, 1024]),
    }
    mode = rng.choice(["none", "truncate", "mask"])
    changes = {
        "grpo": GrpoSpec(
            loss_aggregation=rng.choice(["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"]),
            kl={"weight": 0.1},
            entropy_weight=rng.choice([0.0, 0.01]),
        ),
        "correction": CorrectionSpec(mode=mode, floor=0.5 if mode == "mask" else 0.0),
        "micro_batch_tokens": rng.choice([1, 24, 64, 100_000]),
    }
    num = rng.randint(1, 9)
    first = training_rows(num, seed=seed, has_reference=True)
    second = training_rows(8, seed=seed + 1, has_reference=True)
    return Case(
        model=model,
        layouts=layouts,
        settings=settings,
        # One step, so that the first moment is the gradient; then two, from the resume point.
        requests=(
            training_request(first, mini_batches=[list(range(num))], **changes),
            training_request(second, mini_batches=[[5, 0, 3], [1, 2, 4, 6, 7]], **changes),
        ),
    )


@pytest.fixture(scope="module")
def pool():
    with RankPool(MOST_RANKS) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_family_model(folder / name.replace(" ", "-"), family, layers=LAYERS, **changes)
        for name, (family, changes) in MODELS.items()
    }


def train_in_one_process(model_dir: Path, case: Case, folder: Path) -> list[Any]:
    """Outcomes of both requests; directories `policy-1`, `policy-2` and the resume points beside them."""
    engine = training_engine(model_dir)
    try:
        outcomes = []
        for version, request in enumerate(case.requests, start=1):
            outcomes.append(engine.train(request))
            engine.save(folder / f"policy-{version}", folder / f"trainer-{version}", version)
        return outcomes
    finally:
        engine.close()


def train_in_layouts(pool: RankPool, model_dir: Path, case: Case, folder: Path) -> list[Any]:
    """The same, the second request under the second layout from the resume point of the first.

    Before it trains, the second layout writes what it read to `policy-again` and `trainer-again`.
    """
    outcomes = []
    start = (str(model_dir), None)
    for version, (layout, request) in enumerate(zip(case.layouts, case.requests, strict=True), start=1):
        settings = MegatronSettings(model_dir=str(model_dir), layout=layout, **case.settings)
        paths = (str(folder / f"policy-{version}"), str(folder / f"trainer-{version}"))
        calls = [("load_checkpoint", start), ("train", (request,)), ("save", (*paths, version))]
        if version > 1:
            calls.insert(1, ("save", (str(folder / "policy-again"), str(folder / "trainer-again"), version - 1)))
        answers = pool.run(LayoutJob(settings=settings, calls=calls))
        outcomes.append(next(answer for answer in answers if answer is not None))
        start = paths
    return outcomes


def assert_layouts_train_as_one_process(pool: RankPool, model_dirs: dict[str, Path], folder: Path, seed: int) -> None:
    case = draw_case(seed)
    one, many = folder / "one", folder / "many"
    one.mkdir()
    many.mkdir()
    expected = train_in_one_process(model_dirs[case.model], case, one)
    found = train_in_layouts(pool, model_dirs[case.model], case, many)
    for left, right in zip(expected, found, strict=True):
        for wanted, got in zip(metrics_of(left, METRICS), metrics_of(right, METRICS), strict=True):
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        for wanted, got in zip(left.trainer_logprobs, right.trainer_logprobs, strict=True):
            assert list(got) == pytest.approx(list(wanted), abs=1e-5)
        assert [step.num_tokens for step in left.steps] == [step.num_tokens for step in right.steps]
    for version in (1, 2):
        name = f"policy-{version}"
        assert_equal_tensors(tensors_of(one / name), tensors_of(many / name), absolute=1e-5)
    assert_equal_tensors(tensors_of(many / "policy-again"), tensors_of(many / "policy-1"), absolute=0.0)
    moments = [optimizer_state(many / name) for name in ("trainer-again", "trainer-1")]
    assert_equal_tensors(*moments, absolute=0.0)
    gradients = [optimizer_state(folder / "trainer-1") for folder in (one, many)]
    # The first moment is a tenth of the clipped gradient, so this is 1e-5 in the gradient.
    assert_equal_tensors(*gradients, absolute=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_any_layout_trains_as_one_process_does(pool, model_dirs, tmp_path, seed):
    assert_layouts_train_as_one_process(pool, model_dirs, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 200))
def test_any_of_many_layouts_trains_as_one_process_does(pool, model_dirs, tmp_path, seed):
    assert_layouts_train_as_one_process(pool, model_dirs, tmp_path, seed)


def test_drawn_layouts_are_uneven_in_everything():
    """Otherwise the tests above would show less than they say."""
    layouts = [layout for seed in range(200) for layout in draw_case(seed).layouts]
    assert {(layout.tp, layout.pp, layout.dp) for layout in layouts} == {
        (tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for dp in (1, 2, 3, 4) if 1 < tp * pp * dp <= MOST_RANKS
    }
    assert sum(len(set(layout.stage_layers)) > 1 for layout in layouts) > 50
    assert sum(len(set(layout.shares)) > 1 for layout in layouts) > 50
    first = [draw_case(seed).layouts for seed in range(3)]
    assert {layout.tp > 1 for pair in first for layout in pair} == {True, False}
    assert any(layout.pp > 1 for pair in first for layout in pair)
    assert any(layout.dp > 1 for pair in first for layout in pair)
