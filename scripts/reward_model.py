"""A reward model for a job, made from the job's own first model: `python -m scripts.reward_model --job FILE --out DIR`.

Its score is a linear function of the last hidden state, fitted by least squares so that the right answer of a training
prompt has 2 more than another prompt's answer, and the mean of all is 0. Needs the engines' environment.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.models.dataset_rows import dataset_warm_up_rows
from stages.models.materialise import materialise
from stages.models.request import MaterialiseRequest
from stages.spec.job import TrainingJob, load_training_job

if TYPE_CHECKING:
    from torch import Tensor

NUM_PROMPTS = 64
"""Prompts of the fit, each with a right and a wrong answer."""

RIDGE = 1e-2
"""Weight of the squared coefficients, as a share of the mean squared difference."""

_BATCH = 16
"""Rows of a forward pass."""


def make_reward_model(job: TrainingJob, out_dir: Path) -> float:
    """Write the reward model of a job into a new directory; return the share of its fit's pairs in the right order.

    Raises:
        DataError: the job's source or dataset can't be read, or has fewer than two rows with an answer.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = out_dir.with_name(f".{out_dir.name}.source")
    shutil.rmtree(source, ignore_errors=True)
    request = MaterialiseRequest(
        shape=job.planner.models.actor.llm,
        seed=job.seed,
        warm_up_rows=lambda tokenizer: dataset_warm_up_rows(job.data, job.template, tokenizer),
    )
    try:
        materialise(job.source, request, source)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32).eval()
        states = _last_states(model, list(_rows(job, tokenizer)))
        head = _fitted(states)
        with torch.no_grad():
            model.score.weight.copy_(head)
        model.save_pretrained(out_dir)
        tokenizer.save_pretrained(out_dir)
    finally:
        shutil.rmtree(source, ignore_errors=True)
    return float(((states[0::2] - states[1::2]) @ head.squeeze(0) > 0).float().mean())


def _rows(job: TrainingJob, tokenizer: Any) -> Iterator[list[int]]:  # noqa: ANN401 - transformers has no useful type
    """Yield the tokens of a prompt with its right answer, then with a wrong one, for some prompts."""
    rows = dataset_warm_up_rows(job.data, job.template, tokenizer).train[:NUM_PROMPTS]
    for place, row in enumerate(rows):
        others = (rows[(place + step) % len(rows)].answer_token_ids for step in range(1, len(rows)))
        wrong = next((answer for answer in others if answer != row.answer_token_ids), None)
        if wrong is not None:
            yield [*row.prompt_token_ids, *row.answer_token_ids]
            yield [*row.prompt_token_ids, *wrong]


def _last_states(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:  # noqa: ANN401 - see above
    """Return the hidden state at the last token of each row [N, H]; padding on the right is never looked at."""
    import torch

    found = []
    with torch.inference_mode():
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
            for place, row in enumerate(batch):
                ids[place, : len(row)] = torch.tensor(row)
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            found.append(hidden[torch.arange(len(batch)), torch.tensor([len(row) - 1 for row in batch])])
    return torch.cat(found).clone()


def _fitted(states: Tensor) -> Tensor:
    """Return the coefficients [1, H] of the ridge regression on pairs, solved in their space: they are few."""
    import torch

    exact = states.double()
    mean = exact.mean(dim=0)
    mean /= mean.norm()
    pairs = exact[0::2] - exact[1::2]
    pairs -= (pairs @ mean).unsqueeze(1) * mean  # nothing along the mean, whose score is 0 then
    gram = pairs @ pairs.T
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return (pairs.T @ torch.linalg.solve(gram, gram.new_full((len(gram),), 2.0))).float().unsqueeze(0)


def main() -> int:
    """Make the model and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reward_model", description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    given = parser.parse_args()
    out_dir: Path = given.out.absolute()
    if out_dir.exists():
        sys.stderr.write(f"{out_dir} exists already; give a new directory, or remove it.\n")
        return 2
    job = load_training_job(given.job.read_text(encoding="utf-8"), str(given.job))
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as folder:
        made = Path(folder) / out_dir.name
        share = make_reward_model(job, made)
        made.rename(out_dir)
    print(f"{out_dir}: puts {share:.0%} of the pairs that it was fitted to in the right order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
