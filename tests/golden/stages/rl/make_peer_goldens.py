"""Write peer_goldens.json: advantages and losses as TRL and verl compute them on random inputs.

Run in an environment of its own that has torch, `trl` and `verl` (made with trl 1.16.0 and verl 0.9.1):

    python tests/golden/stages/rl/make_peer_goldens.py

The peers are imported and called; nothing of them is copied. TRL's loss is a method, so it is called on a plain object
that holds the settings it reads; TRL's advantages come from a real GRPOTrainer with a tiny random model.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

ROWS, POSITIONS, LIMIT = 6, 9, 16


def random_batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(ROWS, POSITIONS, generator=generator)
    lengths = torch.randint(1, POSITIONS + 1, (ROWS,), generator=generator)
    return {
        "old_logprobs": old,
        "logprobs": old + 0.35 * torch.randn(ROWS, POSITIONS, generator=generator),
        "reference_logprobs": old + 0.5 * torch.randn(ROWS, POSITIONS, generator=generator),
        "correction_weights": 0.5 + 1.5 * torch.rand(ROWS, POSITIONS, generator=generator),
        "advantages": torch.randn(ROWS, 1, generator=generator),
        "mask": (torch.arange(POSITIONS) < lengths.unsqueeze(1)).float(),
    }


def trl_case(seed: int, **settings) -> dict:
    batch = random_batch(seed)
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = batch["mask"]
    options = {"loss_type": "grpo", "level": "token", "beta": 0.0, "low": 0.2, "high": 0.2, "delta": None, "is": False}
    options.update(settings)
    metrics = {"train": SimpleNamespaceDict()}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options["level"],
        beta=options["beta"],
        loss_type=options["loss_type"],
        epsilon_low=options["low"],
        epsilon_high=options["high"],
        use_vllm=options["is"],
        vllm_importance_sampling_correction=options["is"],
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=options["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        _metrics=metrics,
    )
    ids = torch.zeros(ROWS, POSITIONS, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch["advantages"].squeeze(1),
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["reference_logprobs"],
        "importance_sampling_ratio": batch["correction_weights"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return finish("trl", options, batch, loss, logprobs)


class SimpleNamespaceDict(dict):
    def __missing__(self, key):
        return self.setdefault(key, [])


def verl_case(seed: int, **settings) -> dict:
    batch = random_batch(seed)
    logprobs = batch["logprobs"].clone().requires_grad_()
    options = {"loss_type": "vanilla", "aggregation": "token-mean", "low": 0.2, "high": 0.2, "dual": 3.0, "is": False}
    options.update(settings)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=options["low"],
        clip_ratio_high=options["high"],
        clip_ratio_c=options["dual"],
    )
    config.global_batch_info.update({"loss_scale_factor": LIMIT})
    loss, _ = core_algos.get_policy_loss_fn(options["loss_type"])(
        old_log_prob=batch["old_logprobs"],
        log_prob=logprobs,
        advantages=batch["advantages"].expand(ROWS, POSITIONS),
        response_mask=batch["mask"],
        loss_agg_mode=options["aggregation"],
        config=config,
        rollout_is_weights=batch["correction_weights"] if options["is"] else None,
    )
    return finish("verl", options, batch, loss, logprobs)


def finish(
    peer: str, options: dict, batch: dict[str, torch.Tensor], loss: torch.Tensor, logprobs: torch.Tensor
) -> dict:
    loss.backward()
    return {
        "peer": peer,
        "options": options,
        "inputs": {name: values.tolist() for name, values in batch.items()},
        "loss": loss.item(),
        "gradient": logprobs.grad.tolist(),
    }


def verl_advantages(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=12).round(3)
    rewards[4:8] = 0.5
    groups = np.array([f"g{i // 4}" for i in range(12)], dtype=object)
    order = rng.permutation(12)
    rewards, groups = rewards[order], groups[order]
    scores = torch.zeros(12, 3, dtype=torch.float64)
    scores[:, -1] = torch.tensor(rewards)
    mask = torch.ones(12, 3, dtype=torch.float64)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, groups)
    plain, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, groups, norm_adv_by_std_in_grpo=False)
    rloo, _ = core_algos.compute_rloo_outcome_advantage(scores, mask, groups)
    return {
        "rewards": rewards.tolist(),
        "groups": groups.tolist(),
        "std": grpo[:, 0].tolist(),
        "none": plain[:, 0].tolist(),
        "rloo": rloo[:, 0].tolist(),
    }


def verl_reinforce_pp(seed: int) -> dict:
    """Token advantages of both forms; the KL is part of the token rewards, as verl's trainer hands them over."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 5, 3, 6, 2, 4])
    mask = (torch.arange(6) < lengths.unsqueeze(1)).double()
    kl = 0.1 * torch.randn(6, 6, generator=generator, dtype=torch.float64) * mask
    scores = torch.randn(6, generator=generator, dtype=torch.float64)
    outcome = torch.zeros(6, 6, dtype=torch.float64)
    outcome[torch.arange(6), lengths - 1] = scores
    groups = np.array(["a", "a", "b", "b", "b", "a"], dtype=object)
    plain, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        outcome - 0.5 * kl, mask, config=SimpleNamespace(gamma=1.0)
    )
    baseline, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(outcome, mask, groups)
    return {
        "lengths": lengths.tolist(),
        "scores": scores.tolist(),
        "kl": kl.tolist(),
        "groups": groups.tolist(),
        "plain": plain.tolist(),
        "baseline": baseline.tolist(),
    }


def verl_gae(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    values = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 8, generator=generator) < 0.7).double()
    _, returns = core_algos.compute_gae_advantage_return(rewards * mask, values, mask, 0.97, 0.9)
    returns = torch.where(mask.bool(), returns, torch.zeros_like(returns))
    return {"rewards": rewards.tolist(), "values": values.tolist(), "mask": mask.tolist(), "returns": returns.tolist()}


def verl_values(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    old, new, returns = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = (torch.rand(4, 6, generator=generator) < 0.7).float()
    loss, _ = core_algos.compute_value_loss(new, returns, old, mask, 0.2, "token-mean")
    return {
        "values": new.tolist(),
        "old": old.tolist(),
        "returns": returns.tolist(),
        "mask": mask.tolist(),
        "loss": loss.item(),
    }


def verl_kl(seed: int) -> dict:
    batch = random_batch(seed)
    result: dict = {"logprobs": batch["logprobs"].tolist(), "reference_logprobs": batch["reference_logprobs"].tolist()}
    for ours, theirs in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3_straight_through", "k3+")):
        logprobs = batch["logprobs"].clone().requires_grad_()
        values = core_algos.kl_penalty(logprobs, batch["reference_logprobs"], theirs)
        values.sum().backward()
        result[ours] = {"values": values.tolist(), "gradient": logprobs.grad.tolist()}
    return result


def trl_advantages(scale_rewards: str) -> dict:
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1, head_dim=16)
    )  # fmt: skip
    rewards: list[float | None] = [0.0, 1.0, None, 0.25, 1.0, 1.0, 1.0, 1.0, 3.0, -1.5, 0.5, 0.125]
    captured: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: rewards,
            processing_class=fast,
            train_dataset=Dataset.from_dict({"prompt": ["a b", "b c", "c a"]}),
            args=GRPOConfig(output_dir=folder,
                            per_device_train_batch_size=12, num_generations=4, max_steps=1,
                            use_cpu=True, max_completion_length=4, scale_rewards=scale_rewards, report_to=[],
                            bf16=False, save_strategy="no"),
        )  # fmt: skip
        original = trainer._generate_and_score_completions

        def capture(inputs):
            output = original(inputs)
            captured.append(output["advantages"])
            return output

        trainer._generate_and_score_completions = capture
        # TRL shuffles the rows before training, so what the scorer returns is taken, not what the step gets.
        trainer.train()
    return {"rewards": rewards, "groups": [i // 4 for i in range(12)], "advantages": captured[0].tolist()}


def main() -> None:
    cases = [
        trl_case(1),
        trl_case(2, beta=0.1),
        trl_case(3, **{"is": True, "beta": 0.05}),
        trl_case(4, loss_type="dr_grpo"),
        trl_case(5, loss_type="dapo", high=0.28),
        trl_case(6, level="sequence", low=3e-2, high=4e-2),
        verl_case(7),
        verl_case(8, dual=1.1, high=0.28),
        verl_case(9, aggregation="seq-mean-token-mean", **{"is": True}),
        verl_case(10, aggregation="seq-mean-token-sum-norm"),
        verl_case(11, loss_type="gspo", aggregation="seq-mean-token-mean", low=3e-2, high=4e-2),
    ]
    document = {
        "made_with": {name: version(name) for name in ("trl", "verl", "torch")},
        "max_response_tokens": LIMIT,
        "losses": cases,
        "verl_advantages": verl_advantages(12),
        "verl_gae": verl_gae(13),
        "verl_reinforce_pp": verl_reinforce_pp(16),
        "verl_value_loss": verl_values(14),
        "verl_kl": verl_kl(15),
        "trl_advantages": {name: trl_advantages(name) for name in ("group", "none", "batch")},
    }
    target = Path(__file__).with_name("peer_goldens.json")
    target.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
