"""The whole job document: the planner's part and the sections that execution reads, checked together.

`load_training_job` is the one way from text to a `TrainingJob`. It reports every fault of both parts at once: fields of
the planner's part, fields of each section, and the rules that join several sections (`stages.spec.rules`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from plans.errors import SpecError
from plans.spec.document import parse_document
from plans.spec.job import EXECUTION_SECTIONS, Job, ModelSpec
from plans.spec.load import job_from_document
from plans.spec.model import fingerprint
from plans.spec.suggest import remedy_for_unknown
from stages.data.spec import DataSpec, TemplateSpec
from stages.errors import SpecFaultsError
from stages.home import MAX_ITERATIONS
from stages.rewards.registry import reward_faults
from stages.rewards.spec import RewardsSpec
from stages.rl.correction_spec import CorrectionSpec
from stages.rl.spec import GrpoSpec, KlSpec, PpoSpec
from stages.spec.asynchrony import AsynchronySpec
from stages.spec.execution import (
    EnginesSpec,
    EvaluationSpec,
    LimitsSpec,
    OptimizerSpec,
    ProfileSpec,
    ReplanSpec,
    SamplingSpec,
    StorageSpec,
)
from stages.spec.metrics import MetricsSpec
from stages.spec.rules import cross_section_faults
from stages.spec.section import Section
from stages.spec.source import Source

_FP32_GAP = 0.01
_BF16_GAP = 0.1
"""Nats."""

#: Sections that change neither what is sampled nor what is learned: a run may be continued with other values.
_OPERATIONAL = frozenset({"evaluation", "limits", "metrics", "profile", "replan", "storage"})


class ExecutionSections(Section):
    """The sections of a job document that only execution reads."""

    iterations: int = Field(default=10, ge=1, le=MAX_ITERATIONS)
    """Iterations of the run: policy versions 1 to `iterations` are trained."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initialisation, sampling and training; every random number follows from it and from identities."""
    source: Source
    """First weights of the actor (policy version 0)."""
    data: DataSpec
    """Prompts."""
    template: TemplateSpec = TemplateSpec()
    """Prompts to token ids."""
    rewards: RewardsSpec
    """What is rewarded."""
    sampling: SamplingSpec = SamplingSpec()
    """How completions are sampled."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW."""
    grpo: GrpoSpec = GrpoSpec()
    """Policy optimisation; with `algorithm: ppo` what section `ppo` says of the policy's loss."""
    ppo: PpoSpec | None = None
    """PPO: policy, critic and KL; only with `algorithm: ppo`."""
    asynchrony: AsynchronySpec = AsynchronySpec()
    """Overlap of generation and training."""
    correction: CorrectionSpec = CorrectionSpec()
    """Importance correction between sampler and trainer."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out measurement."""
    storage: StorageSpec = StorageSpec()
    """Where the data goes and how long it stays."""
    engines: EnginesSpec = EnginesSpec()
    """Engines."""
    replan: ReplanSpec = ReplanSpec()
    """When to place again."""
    profile: ProfileSpec = ProfileSpec()
    """When to measure the machines again."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines, tolerances, alarms."""
    metrics: MetricsSpec = MetricsSpec()
    """Outputs for charts."""


class TrainingJob(ExecutionSections):
    """One training run: what the planner reads and what execution reads."""

    planner: Job
    """Algorithm, models, batch and lengths, as `plans` reads them."""

    @property
    def name(self) -> str:
        """Name of the job, for people."""
        return self.planner.name

    @property
    def max_staleness(self) -> int:
        """Policy versions that a rollout may lag when it is trained on."""
        return self.planner.max_staleness

    @property
    def generate_ahead(self) -> int:
        """Iterations that generation may run ahead of training; 0 in sync mode."""
        ahead = self.asynchrony.generate_ahead
        return self.max_staleness if ahead is None else ahead

    @property
    def prompts_per_iteration(self) -> int:
        """Prompt groups that an iteration samples: its batch and the spare ones."""
        return self.planner.batch.prompts + self.asynchrony.spare_prompts

    @property
    def responses_per_prompt(self) -> int:
        """Completions per prompt."""
        return self.planner.batch.responses_per_prompt

    @property
    def prompts_per_shard(self) -> int:
        """Prompts of one rollout shard; depends on the job only, never on the placement."""
        return max(1, self.storage.samples_per_shard // self.responses_per_prompt)

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Optimizer steps that one iteration makes at most (an iteration without signal makes fewer)."""
        return self.grpo.num_mini_batches * self.grpo.num_epochs

    @property
    def kl(self) -> KlSpec:
        """The penalty towards the reference policy."""
        return self.grpo.kl if self.ppo is None else self.ppo.kl

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl.weight > 0

    @property
    def reward_model(self) -> ModelSpec | None:
        """The reward model; None where rules alone reward."""
        reward = self.planner.models.reward
        return reward if isinstance(reward, ModelSpec) else None

    @property
    def canary_max_gap(self) -> float:
        """Largest gap in nats that the canary allows, the default for the job's numeric types written out."""
        limit, engines = self.limits.canary_max_logprob_gap, self.engines
        if limit is not None:
            return limit
        sampling = (engines.generation.dtype, *engines.generation.dtype_on.values())
        training = (self.planner.training.precision.value, engines.training.options.get("serving_dtype") or "fp32")
        return _FP32_GAP if {*sampling, *training} == {"fp32"} else _BF16_GAP

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what determines the sampled tokens and the learned weights.

        Names and operational sections are left out, and so is the number of iterations unless the learning rate
        depends on it: a run may be extended.
        """
        content = self.model_dump(mode="json", exclude={*_OPERATIONAL, "planner", "engines", "iterations"})
        content["planner"] = self.planner.fingerprint
        content["models"] = {
            role: model.model_dump(mode="json", include={"path", "revision"})
            for role, model in (("critic", self.planner.models.critic), ("reward", self.reward_model))
            if model is not None and model.path is not None
        }
        content["engines"] = self.engines.model_dump(mode="json", include={"generation", "training"})
        if self.engines.training.lora is None:
            del content["engines"]["training"]["lora"]  # the fingerprint of a run without it is older than the field
        if not self.engines.generation.dtype_on:
            del content["engines"]["generation"]["dtype_on"]  # for the same reason
        if self.optimizer.schedule != "constant":
            content["iterations"] = self.iterations
        return fingerprint(content)

    def to_document(self) -> dict[str, JsonValue]:
        """Return the document with all defaults; `training_job_from_document` reads it back as an equal job."""
        # Nulls stay: where a default is no null (e.g. `source.warm_up`), null means something else than absence.
        document: dict[str, JsonValue] = self.planner.model_dump(mode="json", exclude={"execution"})
        # Derived: a changed option of the engine decides again.
        document["training"] = self.planner.training.model_dump(mode="json", exclude={"sharding"})
        derived = {"grpo"} if self.ppo is not None else set()
        return document | self.model_dump(mode="json", exclude={"planner", *derived})


def load_training_job(text: str, source_name: str) -> TrainingJob:
    """Return the job of a JSON or YAML text.

    Args:
        text: The document.
        source_name: Name that messages use, normally the file's path.

    Raises:
        SpecFaultsError: with every fault of the document.
    """
    try:
        document, faults = parse_document(text, source_name)
    except SpecError as error:
        raise SpecFaultsError(source_name, [fault.sentence() for fault in error.faults]) from error
    try:
        job = training_job_from_document(document, source_name)
    except SpecFaultsError as error:
        # Null stands where a value was that JSON does not have; what is said of it there is said already.
        known = tuple(f"{fault.field} is " for fault in faults)
        others = [sentence for sentence in error.faults if not sentence.startswith(known)]
        raise SpecFaultsError(source_name, [*(fault.sentence() for fault in faults), *others]) from error
    if faults:
        raise SpecFaultsError(source_name, [fault.sentence() for fault in faults])
    return job


def training_job_from_document(document: Mapping[str, object], source_name: str) -> TrainingJob:
    """Return the job of a parsed document; raises SpecFaultsError with every fault."""
    document = {**document, "ppo": document.get("ppo") or {}} if document.get("algorithm") == "ppo" else document
    sections, faults = _read_sections(document)
    if sections is not None and sections.ppo is not None:
        if "grpo" in document:
            faults.append("grpo is given beside ppo, whose section has all options; move them to ppo, remove grpo.")
        sections = sections.model_copy(update={"grpo": sections.ppo.policy()})
    if sections is not None:
        faults.extend(f"{fault}." for fault in reward_faults(sections.rewards, allow_python_callables=True))
    planner, planner_faults = _read_planner(document, sections, source_name)
    faults = [*planner_faults, *faults]
    if sections is not None and planner is not None:
        fields = {name: getattr(sections, name) for name in ExecutionSections.model_fields}
        job = TrainingJob(planner=planner, **fields)
        faults.extend(cross_section_faults(job))
        if not faults:
            return job
    raise SpecFaultsError(source_name, faults)


def _read_planner(
    document: Mapping[str, object], sections: ExecutionSections | None, source_name: str
) -> tuple[Job | None, list[str]]:
    rest = {name: value for name, value in document.items() if name not in EXECUTION_SECTIONS}
    training = rest.get("training", {})
    if sections is not None and isinstance(training, dict):
        # The planner prices optimizer steps and memory; both follow from the job's sections unless written down.
        steps = sections.grpo.num_mini_batches * sections.grpo.num_epochs
        rest["training"] = {"updates_per_iteration": steps, "sharding": sections.engines.training.sharding, **training}
    try:
        return job_from_document(rest, source_name), []
    except SpecError as error:
        return None, [fault.sentence() for fault in error.faults]


def _read_sections(document: Mapping[str, object]) -> tuple[ExecutionSections | None, list[str]]:
    """Return the sections and their faults; with faults in optional sections, the sections with defaults instead."""
    raw = {name: value for name, value in document.items() if name in EXECUTION_SECTIONS}
    data, lengths = raw.get("data"), document.get("lengths")
    if isinstance(data, dict) and isinstance(lengths, dict) and isinstance(lengths.get("prompt"), int):
        raw["data"] = {"max_prompt_tokens": lengths["prompt"], **data}
    sections, errors = _validate(raw)
    if errors:
        faulty = {str(error["loc"][0]) for error in errors}
        sections, _ = _validate({name: value for name, value in raw.items() if name not in faulty})
    return sections, [_sentence(error) for error in errors]


def _validate(raw: Mapping[str, object]) -> tuple[ExecutionSections | None, list[ErrorDetails]]:
    try:
        return ExecutionSections.model_validate_json(json.dumps(raw), strict=True), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


_SOURCE_TYPES = frozenset({"hf", "gguf", "init"})


def _sentence(error: ErrorDetails) -> str:
    location = error["loc"]
    if location[0] == "source" and len(location) > 1 and location[1] in _SOURCE_TYPES:
        location = (location[0], *location[2:])  # pydantic's name of the union branch, no part of the document
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if error["type"] == "missing":
        return f"{where} is missing, but it is required; add the field."
    if error["type"] == "extra_forbidden":
        remedy = remedy_for_unknown(ExecutionSections, error["loc"])
        return f"{where} is given, but this format has no such field; {remedy}."
    rule = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {rule}."
    found = json.dumps(error["input"], default=str, ensure_ascii=False)
    return f"{where} is {found[:80]}, but {rule[:1].lower() + rule[1:]}; write an allowed value."
