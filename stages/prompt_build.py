"""Child process that reads, encodes and checks a dataset.

`python -m stages.prompt_build --folder FOLDER [--model-dir MODEL] [--checked FOLDER]`

Reads `spec.json` in the folder, writes `train.arrow`, `held_out.arrow` and `facts.json` there, or `failure.json`. A
process of its own, since tokenizer libraries load torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stages.data.dataset import load_dataset
from stages.data.rows import PromptRow
from stages.data.spec import DataSpec, TemplateSpec
from stages.data.template import EncodedPrompt, PromptEncoder, tokenizer_hash
from stages.data.validation import ValidatedDataset, validate_dataset
from stages.failures import record_failure
from stages.prompts import FACTS_NAME, FAILURE_NAME, HELD_OUT_NAME, SPEC_NAME, TRAIN_NAME
from stages.rewards.reachable_gold import unreachable_gold
from stages.rewards.spec import RewardsSpec
from stages.source_tokenizer import load_source_tokenizer
from stages.spec.source import Source
from stages.verifiers import open_pool


def build(folder: Path, model_dir: Path | None, checked: Path | None = None) -> None:
    """Write the encoded prompts of the spec in a folder.

    Args:
        folder: Holds `spec.json`; takes the results.
        model_dir: Directory with the tokenizer; None takes that of the spec's `source` (preflight check).
        checked: What such a check of the same spec left; taken over if tokenizer and template are the same.

    Raises:
        DataError: rows that can't be used.
        RewardError: verifiers that can't be set up.
    """
    spec = json.loads((folder / SPEC_NAME).read_text(encoding="utf-8"))
    tokenizer = _tokenizer(spec, model_dir)
    encoder = PromptEncoder(TemplateSpec.model_validate(spec["template"]), tokenizer)
    if checked is not None and _take_over(checked, folder, encoder.template_hash, tokenizer_hash(tokenizer)):
        return
    data = DataSpec.model_validate(spec["data"])
    loaded = load_dataset(data)
    rows = (*loaded.train.rows, *loaded.held_out.rows)
    encoded = encoder.encode_all(rows)
    rewards = RewardsSpec.model_validate(spec["rewards"])
    with open_pool(rewards) as pool:
        gold_faults = pool.gold_faults(rows)
    unjudged = {fault.prompt_id for fault in gold_faults}
    judged = [row for row in rows if row.prompt_id not in unjudged]
    gold_faults += unreachable_gold(judged, rewards, encoder.shortest, spec["max_response_tokens"])
    valid = validate_dataset(
        loaded,
        data,
        encoded=encoded,
        gold_faults=gold_faults,
        max_prompt_tokens=data.max_prompt_tokens,
        max_over_length_fraction=spec["max_over_length_fraction"],
        num_prompts=spec["num_prompts"],
    )
    by_id = {prompt.prompt_id: prompt for prompt in encoded}
    _write(folder / TRAIN_NAME, valid.dataset.train.rows, by_id)
    _write(folder / HELD_OUT_NAME, valid.dataset.held_out.rows, by_id)
    facts = _facts(valid, encoder.template_hash, tokenizer_hash(tokenizer), by_id)
    (folder / FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")


def _take_over(checked: Path, folder: Path, template_hash: str, tokenizer_hash_: str) -> bool:
    """Take the files of a check whose prompts were encoded in the same way; whether it could be done."""
    try:
        facts = json.loads((checked / FACTS_NAME).read_text(encoding="utf-8"))
        if (facts["template_hash"], facts["tokenizer_hash"]) != (template_hash, tokenizer_hash_):
            return False
        for name in (TRAIN_NAME, HELD_OUT_NAME, FACTS_NAME):  # the facts last: they mark the end
            shutil.copyfile(checked / name, folder / name)
    except OSError:
        return False  # there was no check on this machine, or another process takes its files away
    shutil.rmtree(checked, ignore_errors=True)
    return True


def _tokenizer(spec: dict[str, Any], model_dir: Path | None) -> Any:  # noqa: ANN401 - transformers has no useful type
    if model_dir is None:
        source: Source = TypeAdapter(Source).validate_python(spec["source"])
        return load_source_tokenizer(source)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def _facts(
    checked: ValidatedDataset, template_hash: str, tokenizer_hash_: str, encoded: dict[str, EncodedPrompt]
) -> dict[str, Any]:
    dataset = checked.dataset
    kept = [row.prompt_id for row in (*dataset.train.rows, *dataset.held_out.rows)]
    lengths = [len(encoded[prompt_id].token_ids) for prompt_id in kept]
    mixture = dataset.mixture.shares(kept)
    return {
        "dataset_fingerprint": dataset.fingerprint,
        "template_hash": template_hash,
        "tokenizer_hash": tokenizer_hash_,
        "num_train": len(dataset.train),
        "num_held_out": len(dataset.held_out),
        "num_dropped_duplicates": dataset.num_dropped_duplicates,
        "num_dropped_too_long": checked.num_dropped_too_long,
        "num_dropped_unparsable_gold": checked.num_dropped_unparsable_gold,
        "longest_prompt_tokens": max(lengths),
        "mean_prompt_tokens": sum(lengths) / len(lengths),
        **({"mixture": mixture} if len(mixture) > 1 else {}),
    }


def _write(path: Path, rows: Sequence[PromptRow], encoded: dict[str, EncodedPrompt]) -> None:
    import pyarrow as pa

    prompts = [encoded[row.prompt_id] for row in rows]
    table = pa.table(
        {
            "prompt_id": pa.array([row.prompt_id for row in rows], pa.string()),
            "row": pa.array([json.dumps(row.to_json(), ensure_ascii=False) for row in rows], pa.string()),
            "text": pa.array([prompt.text for prompt in prompts], pa.string()),
            "token_ids": pa.array([list(prompt.token_ids) for prompt in prompts], pa.list_(pa.int32())),
        }
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def main() -> int:
    """Build, or record why it failed."""
    parser = argparse.ArgumentParser(prog="python -m stages.prompt_build")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--checked", type=Path)
    options = parser.parse_args()
    try:
        build(options.folder, options.model_dir, options.checked)
    except Exception as error:  # noqa: BLE001 - the process boundary: the parent raises it again
        record_failure(options.folder / FAILURE_NAME, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
