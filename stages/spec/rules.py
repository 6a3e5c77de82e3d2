"""Rules that join several sections of a job; each returns complete sentences and never stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from plans.spec.job import Algorithm, Mode, ModelSpec
from stages.rl.spec import sampling_faults
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
    ]  # fmt: skip


def _algorithm_faults(job: TrainingJob) -> Iterator[str]:
    if job.planner.algorithm is Algorithm.PPO:
        yield "algorithm is ppo, but the training engines make GRPO steps only; write algorithm: grpo."
    elif job.ppo is not None:
        yield "ppo is given, but algorithm is grpo; remove the section or write algorithm: ppo."
    steps = job.planner.training.updates_per_iteration
    if steps != job.optimizer_steps_per_iteration:
        yield (
            f"training.updates_per_iteration is {steps}, but grpo.num_mini_batches x grpo.num_epochs is "
            f"{job.optimizer_steps_per_iteration}; remove updates_per_iteration or correct one of them."
        )


def _model_faults(job: TrainingJob) -> Iterator[str]:
    models = job.planner.models
    if isinstance(models.reward, ModelSpec):
        yield "models.reward is a model, but rewards are computed by rules; write models.reward: {verifier: NAME}."
    if models.actor.path is not None:
        yield "models.actor.path is given, but the first weights come from `source`; move the path there."
    if job.needs_reference and models.reference.path is not None:
        yield "models.reference.path is given, but the reference policy is policy version 0; remove the path."
    if job.needs_reference and models.reference.llm != models.actor.llm:
        yield (
            f"models.reference has another shape than models.actor although grpo.kl.weight is {job.grpo.kl.weight}: "
            "the reference policy is policy version 0 of the actor; give both the same shape."
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
    if batch.prompts % grpo.num_mini_batches:
        yield (
            f"batch.prompts is {batch.prompts}, but grpo.num_mini_batches is {grpo.num_mini_batches} and a mini-batch "
            "holds whole prompt groups; choose a divisor."
        )
    if batch.responses_per_prompt < 2:
        yield "batch.responses_per_prompt is 1, but a group advantage compares the samples of a prompt; use 2 or more."
    if grpo.overlong_buffer_tokens > job.planner.lengths.response:
        yield (
            f"grpo.overlong_buffer_tokens is {grpo.overlong_buffer_tokens}, but lengths.response is "
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
