"""Write the generated cluster and job files of examples/: `python scripts/write_planner_examples.py`.

Scaling clusters beyond 64 GPUs are left to `motley testbed scaling-N`: their files would be long.
"""

from __future__ import annotations

from pathlib import Path

from plans.spec.job import Algorithm, Mode
from plans.testbeds.areal_hex import BUDGETS
from plans.testbeds.document import cluster_yaml, job_yaml
from plans.testbeds.jobs import SIZES, hetrl_job
from plans.testbeds.registry import HETRL_SCENARIOS, SMALL_COUNTS, find_testbed

ROOT = Path(__file__).resolve().parents[1] / "examples"
CLUSTERS = (
    *HETRL_SCENARIOS,
    *(f"hetrl-multi-region-hybrid-{size}" for size in SMALL_COUNTS),
    *(f"hetrl-single-region-{size}" for size in SMALL_COUNTS),
    *BUDGETS,
    "scaling-64",
)
JOB_COMMENT = (
    "A job of HetRL's evaluation (arXiv 2512.12476): Qwen3 of one size in every role, GSM8K, prompts and responses of "
    "at most 1,024 tokens, 8 responses per prompt, 384 prompts. Published: sizes, lengths, batch; reconstructed: "
    "that the 384 count prompts, and the reward as a model of equal size."
)


def main() -> None:
    """Write every file."""
    for name in CLUSTERS:
        (ROOT / "clusters" / f"{name}.yaml").write_text(cluster_yaml(find_testbed(name)), encoding="utf-8")
    for size in SIZES:
        for algorithm in Algorithm:
            for mode in Mode:
                job = hetrl_job(size, algorithm, mode)
                text = job_yaml(job, JOB_COMMENT)
                (ROOT / "jobs" / "planner" / f"{job.name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
