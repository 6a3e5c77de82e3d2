"""One commit for policy and critic: what stage commit_policy refuses of PPO runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from stages import commit_policy
from stages.context import StageContext
from stages.errors import ContractError
from stages.kl_state import KL_WEIGHT_KEY, kl_weight_of, with_kl_weight
from stages.plan import queues_of
from stages.rl.spec import GrpoSpec
from stages.runs import ResolvedRun, create_run, resolve_run
from storage.checkpoints import save_checkpoint
from storage.critics import publish_critic
from storage.errors import CorruptObjectError
from storage.policies import head_version, publish_policy
from tests.helpers.stage_contexts import CLUSTER, make_context

JOB = (Path(__file__).parents[3] / "examples" / "ppo-quickstart" / "job.yaml").read_text()


@pytest.fixture
def run(tmp_path: Path) -> ResolvedRun:
    run = resolve_run(JOB, CLUSTER.format(base=tmp_path), "r", 5, None, str(tmp_path / "none"))
    create_run(run)
    return run


def publish(context: StageContext, version: int, *, policy_data: str, critic_data: str | None) -> None:
    weights = save({"w": np.full(4, version, dtype=np.float32)})
    save_checkpoint(
        context.home, "r", version, {"random_rank_0.safetensors": weights}, config_hash=context.job.fingerprint,
        dataset_fingerprint="d", data_position={}, rng_files=["random_rank_0.safetensors"], created_by="test",
        metadata={KL_WEIGHT_KEY: 0.125},
    )  # fmt: skip
    publish_policy(
        context.home, "r", version, {"model.safetensors": weights}, created_by="test", is_head=version == 0,
        metadata={"data": policy_data},
    )  # fmt: skip
    if critic_data is not None:
        publish_critic(
            context.home, "r", version, {"model.safetensors": weights}, {"trainer.json": b"{}"},
            config_hash=context.job.fingerprint, dataset_fingerprint="d", created_by="test",
            metadata={"data": critic_data},
        )  # fmt: skip


def test_policy_and_critic_of_the_same_data_are_committed_together(run: ResolvedRun, tmp_path: Path) -> None:
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, policy_data="", critic_data="")
    publish(context, 1, policy_data="x", critic_data="x")
    commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 1


def test_policy_and_critic_of_different_data_are_refused(run: ResolvedRun, tmp_path: Path) -> None:
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, policy_data="", critic_data="")
    publish(context, 1, policy_data="x", critic_data="y")
    with pytest.raises(ContractError, match="were trained on different rollouts"):
        commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 0


def test_policy_alone_is_refused(run: ResolvedRun, tmp_path: Path) -> None:
    context = make_context(run, tmp_path, "commit_policy", 0)
    publish(context, 0, policy_data="", critic_data="")
    publish(context, 1, policy_data="x", critic_data=None)
    with pytest.raises(CorruptObjectError, match="critic version 1 is not published"):
        commit_policy.run_stage(context)
    assert head_version(context.home, "r") == 0


def test_penalty_weight_is_read_from_the_resume_point_after_the_first_iteration(
    run: ResolvedRun, tmp_path: Path
) -> None:
    first = make_context(run, tmp_path, "train", 0)
    assert kl_weight_of(first) == 0.02
    publish(first, 1, policy_data="", critic_data=None)
    assert kl_weight_of(make_context(run, tmp_path, "train", 1)) == 0.125


def test_weight_enters_a_loss_that_has_the_penalty_and_no_other() -> None:
    in_loss = GrpoSpec.model_validate({"kl": {"weight": 0.1}})
    in_reward = GrpoSpec.model_validate({"loss": "reinforce_pp", "kl": {"weight": 0.1}})
    assert with_kl_weight(in_loss, 0.2).kl.weight == 0.2
    assert with_kl_weight(in_reward, 0.2) == in_reward
    assert with_kl_weight(GrpoSpec(), 0.2) == GrpoSpec()


def test_plan_gives_every_ppo_stage_its_queues(run: ResolvedRun, tmp_path: Path) -> None:
    context = make_context(run, tmp_path, "plan", 0)
    queues = queues_of(context.plan, run.cluster)
    assert {queues[name][0] for name in ("reward_inference", "critic_inference", "critic_training", "train")} == {"a0"}
