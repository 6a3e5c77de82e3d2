"""Rules that join several sections of a job; each returns complete sentences and never stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from plans.spec.job import Algorithm, Mode, Precision
from stages.rl.spec import sampling_faults
from stages.rl.variants.registry import VARIANTS
from stages.spec.asynchrony import AsynchronySpec
from stages.spec.source import GgufSource, InitSource

if TYPE_CHECKING:  # stages.spec.job imports this module
    from stages.spec.job import TrainingJob

#: Tokens that the characters tokenizer has beside its alphabet: pad, bos, eos, unk.
NUM_SPECIAL_CHARACTER_TOKENS = 4


def cross_section_faults(job: TrainingJob) -> list[str]:
    """Return every fault that only several sections together show, in the order of the document."""
    return [
        *_algorithm_faults(job),
        *_model_faults(job),
        *_source_faults(job),
        *_data_faults(job),
        *_batch_faults(job),
        *(f"{text}." for text in sampling_faults(
            job.correction, top_p=job.sampling.top_p, top_k=job.sampling.top_k)),
        *_staleness_faults(job),
        *_engine_faults(job),
    ]  # fmt: skip


def _engine_faults(job: TrainingJob) -> Iterator[str]:
    yield from _lora_faults(job)
    wanted, planned = job.engines.training.sharding, job.planner.training.sharding.value
    if wanted != planned:
        yield (
            f"training.sharding is {planned}, but engines.training runs with sharding {wanted}; remove "
            "training.sharding, or correct engines.training.options.sharding."
        )
    if job.engines.training.name == "megatron" and job.planner.training.precision is Precision.BF16:
        yield (
            "training.precision is bf16, but engine megatron keeps an fp32 copy of the weights; write bf16-mixed or "
            "fp32, or engines.training.name: accelerate."
        )


def _lora_faults(job: TrainingJob) -> Iterator[str]:
    lora = job.engines.training.lora
    if lora is None:
        return
    if job.engines.training.name == "megatron":
        yield (
            "engines.training.lora is given, but engine megatron trains whole weights only; write "
            "engines.training.name: accelerate, or remove lora."
        )
    shape = job.planner.models.actor.llm
    has_keys = {"k_proj", "v_proj"} & set(lora.target_modules)
    most = min(shape.hidden, shape.kv_heads * shape.head_dim) if has_keys else shape.hidden
    if lora.rank > most:
        yield (
            f"engines.training.lora.rank is {lora.rank}, but the smallest side of an adapted layer of models.actor is "
            f"{most}, above which an adapter is larger than the layer it stands for; lower it."
        )


def _algorithm_faults(job: TrainingJob) -> Iterator[str]:
    is_ppo = job.planner.algorithm is Algorithm.PPO
    if not is_ppo and job.ppo is not None:
        yield "ppo is given, but algorithm is grpo; remove the section or write algorithm: ppo."
    if not is_ppo and job.grpo.loss == "ppo":
        yield "grpo.loss is ppo, but algorithm is grpo; write algorithm: ppo with a section ppo and models.critic."
    steps = job.planner.training.updates_per_iteration
    if steps != job.optimizer_steps_per_iteration:
        section = "ppo" if is_ppo else "grpo"
        yield (
            f"training.updates_per_iteration is {steps}, but {section}.num_mini_batches x {section}.num_epochs is "
            f"{job.optimizer_steps_per_iteration}; remove updates_per_iteration or correct one of them."
        )
    if job.ppo is not None and job.ppo.critic_warm_up_iterations >= job.iterations:
        yield (
            f"ppo.critic_warm_up_iterations is {job.ppo.critic_warm_up_iterations}, but the run has {job.iterations} "
            "iterations, so the policy would never be trained; lower it or raise iterations."
        )


def _model_faults(job: TrainingJob) -> Iterator[str]:
    models = job.planner.models
    if models.actor.path is not None:
        yield "models.actor.path is given, but the first weights come from `source`; move the path there."
    if job.needs_reference and models.reference.path is not None:
        yield "models.reference.path is given, but the reference policy is policy version 0; remove the path."
    if job.needs_reference and models.reference.llm != models.actor.llm:
        yield (
            "models.reference has another shape than models.actor although "
            f"{'grpo' if job.ppo is None else 'ppo'}.kl.weight is {job.kl.weight}: "
            "the reference policy is policy version 0 of the actor; give both the same shape."
        )
    yield from _critic_faults(job)
    yield from _reward_model_faults(job)


def _critic_faults(job: TrainingJob) -> Iterator[str]:
    actor, critic = job.planner.models.actor, job.planner.models.critic
    if critic is None:
        return
    if critic.llm.vocab != actor.llm.vocab:
        yield (
            f"models.critic.shape.vocab is {critic.llm.vocab}, but models.actor.shape.vocab is {actor.llm.vocab}: the "
            "critic reads the actor's token ids; use a critic of the actor's vocabulary."
        )
    elif critic.path is None and critic.llm != actor.llm:
        yield (
            "models.critic has another shape than models.actor and no path, but a critic without a path starts from "
            "the actor's weights; give both the same shape, or a path."
        )


def _reward_model_faults(job: TrainingJob) -> Iterator[str]:
    model, section = job.reward_model, job.rewards.reward_model
    if model is None and section is not None:
        yield (
            "rewards.reward_model is given, but models.reward is a rule; write models.reward: {shape: ..., path: ...}."
        )
    if model is None:
        return
    if section is None:
        yield (
            "models.reward is a model, but nothing says how its score is used; add "
            "rewards.reward_model: {weight: 1.0}, or write models.reward: {verifier: NAME}."
        )
    if model.path is None:
        yield "models.reward has no path; give the directory of a sequence classifier in Hugging Face format."
    if model.llm.vocab != job.planner.models.actor.llm.vocab:
        yield (
            f"models.reward.shape.vocab is {model.llm.vocab}, but models.actor.shape.vocab is "
            f"{job.planner.models.actor.llm.vocab}: the reward model reads the actor's token ids; use one of the "
            "actor's tokenizer."
        )


def _source_faults(job: TrainingJob) -> Iterator[str]:
    source = job.source
    if isinstance(source, GgufSource):
        if (source.path is None) == (source.package is None):
            yield (
                f"source has path {source.path!r} and package {source.package!r}, but exactly one of them names the "
                "GGUF file; remove or add one."
            )
        if source.member is not None and source.package is None:
            yield f"source.member is {source.member!r} without source.package; members are of packages only, remove it."
    if isinstance(source, InitSource):
        needed = len(set(source.alphabet)) + NUM_SPECIAL_CHARACTER_TOKENS
        vocab = job.planner.models.actor.llm.vocab
        if vocab < needed:
            yield (
                f"models.actor.shape.vocab is {vocab}, but source.alphabet and {NUM_SPECIAL_CHARACTER_TOKENS} special "
                f"tokens need {needed}; enlarge vocab or shorten the alphabet."
            )


def _data_faults(job: TrainingJob) -> Iterator[str]:
    limit, longest = job.data.max_prompt_tokens, job.planner.lengths.prompt
    if limit > longest:
        yield (
            f"data.max_prompt_tokens is {limit}, but lengths.prompt is {longest}; lower it, or remove it to take "
            "lengths.prompt."
        )
    allowed = job.limits.max_over_length_fraction
    if (job.data.too_long == "drop") != (allowed > 0):
        yield (
            f"data.too_long is {job.data.too_long!r} with limits.max_over_length_fraction {allowed}, but prompts are "
            "dropped only up to a share above 0; set both or neither."
        )
    if job.data.held_out_fraction == 0 and job.data.held_out_source is None:
        yield (
            "data.held_out_fraction is 0 without data.held_out_source, but the policy is evaluated on held-out prompts "
            "before and after the run; hold some out."
        )


def _batch_faults(job: TrainingJob) -> Iterator[str]:
    batch, grpo = job.planner.batch, job.grpo
    section = "ppo" if job.ppo is not None else "grpo"
    if batch.prompts % grpo.num_mini_batches:
        yield (
            f"batch.prompts is {batch.prompts}, but {section}.num_mini_batches is {grpo.num_mini_batches} and a "
            "mini-batch holds whole prompt groups; choose a divisor."
        )
    if batch.responses_per_prompt < 2 and VARIANTS[grpo.loss].needs_group:
        yield (
            f"batch.responses_per_prompt is 1, but the advantage of {grpo.loss} compares the samples of a prompt; use "
            "2 or more."
        )
    if grpo.dynamic_sampling is not None and job.reward_model is not None:
        yield (
            "grpo.dynamic_sampling is given, but the job has a reward model: whether a group has signal is judged "
            "where it is sampled, by rules only; remove one of them."
        )
    if grpo.dynamic_sampling is not None and job.planner.mode is Mode.ASYNC:
        yield (
            "grpo.dynamic_sampling is given with mode async, but the rounds of a shard are sampled from one policy "
            "version and no group may wait for a later iteration; use mode: sync or remove it."
        )
    if grpo.dynamic_sampling is not None and not grpo.drop_zero_variance_groups:
        yield (
            "grpo.dynamic_sampling replaces groups without signal, but drop_zero_variance_groups is false, so they "
            "would be trained on too; leave it true or remove dynamic_sampling."
        )
    if grpo.overlong_buffer_tokens > job.planner.lengths.response:
        yield (
            f"{section}.overlong_buffer_tokens is {grpo.overlong_buffer_tokens}, but lengths.response is "
            f"{job.planner.lengths.response}; the buffer lies inside the response limit."
        )


def _staleness_faults(job: TrainingJob) -> Iterator[str]:
    asynchrony = job.asynchrony
    if job.planner.mode is Mode.SYNC:
        if asynchrony != AsynchronySpec():
            given = ", ".join(f"asynchrony.{name}" for name in sorted(asynchrony.model_fields_set))
            yield f"{given} is given, but mode is sync, where nothing overlaps; remove it or write mode: async."
        return
    if job.correction.mode == "none" and job.correction.clip_around == "proximal":
        yield (
            f"correction.mode is none with max_staleness {job.max_staleness}, but stale rollouts need importance "
            "correction; remove the section, or name a correction (truncated_token, decoupled_ppo, behaviour_ppo ...)."
        )
    if job.generate_ahead > job.max_staleness and not asynchrony.spare_prompts:
        yield (
            f"asynchrony.generate_ahead is {job.generate_ahead} with max_staleness {job.max_staleness}, but rollouts "
            "over the bound are withheld and nothing could take their place; set asynchrony.spare_prompts, or lower "
            "generate_ahead."
        )
