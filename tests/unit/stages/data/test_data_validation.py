"""Up-front validation: every fault at once, with counts and examples."""

from __future__ import annotations

import pytest

from stages.data.dataset import SplitDataset, load_dataset
from stages.data.gold_fault import GoldFault
from stages.data.spec import DataSpec
from stages.data.template import EncodedPrompt
from stages.data.validation import ValidatedDataset, validate_dataset
from stages.errors import DataError


def data() -> SplitDataset:
    return load_dataset(DataSpec(source="arithmetic:addition", size=10, held_out_fraction=0.2))


def validate(
    *, long: int = 0, empty: int = 0, bad_gold: int = 0, fraction: float = 0.0, num_prompts: int = 2, **fields: object
) -> ValidatedDataset:
    dataset = data()
    rows = (*dataset.train.rows, *dataset.held_out.rows)
    lengths = [9] * long + [0] * empty + [5] * (10 - long - empty)
    encoded = [
        EncodedPrompt(prompt_id=row.prompt_id, text="", token_ids=(1,) * length)
        for row, length in zip(rows, lengths, strict=True)
    ]
    faults = [GoldFault(prompt_id=row.prompt_id, reasons=("exact_answer: no",)) for row in rows[10 - bad_gold :]]
    return validate_dataset(
        dataset,
        DataSpec.model_validate({"source": "arithmetic:addition"} | fields),
        encoded=encoded,
        gold_faults=faults,
        max_prompt_tokens=8,
        max_over_length_fraction=fraction,
        num_prompts=num_prompts,
    )


def test_clean_dataset_stays_as_it_is() -> None:
    assert validate() == ValidatedDataset(dataset=data(), num_dropped_too_long=0, num_dropped_unparsable_gold=0)


def test_all_faults_are_reported_together_with_counts_and_first_examples() -> None:
    with pytest.raises(DataError) as raised:
        validate(long=2, empty=1, bad_gold=4)
    message = str(raised.value)
    assert "1 prompts have no token" in message
    assert "2 of 10 prompts are longer than 8 tokens, first: arithmetic:addition/" in message
    assert "(9 tokens)" in message
    assert "4 of 10 gold answers can't be judged or given" in message
    assert message.count("exact_answer: no") == 3
    assert raised.value.attributes["num_faults"] == 3


def test_r6_rows_with_unparsable_gold_are_dropped_and_counted_when_allowed() -> None:
    result = validate(bad_gold=3, unparsable_gold="drop")
    assert (len(result.dataset.train), len(result.dataset.held_out), result.num_dropped_unparsable_gold) == (7, 0, 3)


def test_r10_rewards_that_fit_no_row_are_refused_even_when_rows_may_be_dropped() -> None:
    with pytest.raises(DataError, match="can't judge a single one of 10 rows, so the reward section doesn't fit"):
        validate(bad_gold=10, unparsable_gold="drop")


def test_long_prompts_are_dropped_up_to_the_allowed_share() -> None:
    result = validate(long=2, too_long="drop", fraction=0.2)
    assert (len(result.dataset.train), result.num_dropped_too_long) == (6, 2)
    with pytest.raises(DataError, match=r"the share 0\.3 is over limits\.max_over_length_fraction 0\.2"):
        validate(long=3, too_long="drop", fraction=0.2)


def test_too_few_rows_for_an_iteration_are_refused() -> None:
    with pytest.raises(DataError, match=r"8 rows remain to train on .* an iteration takes 9 \(batch\.prompts"):
        validate(num_prompts=9)


def test_prompts_that_the_tokenizer_does_not_know_are_refused_with_their_text() -> None:
    """A character outside the alphabet would be read as <unk>, and the policy would learn from it without a word."""
    dataset = data()
    rows = (*dataset.train.rows, *dataset.held_out.rows)
    encoded = [
        EncodedPrompt(prompt_id=row.prompt_id, text=f"{n}*1=", token_ids=(1, 3), num_unknown=n % 2)
        for n, row in enumerate(rows)
    ]
    with pytest.raises(DataError, match=r"5 of 10 prompts hold text that the tokenizer doesn't know, first: .*'1\*1='"):
        validate_dataset(
            dataset, DataSpec(source="arithmetic:addition"), encoded=encoded, gold_faults=[], max_prompt_tokens=8,
            max_over_length_fraction=0.0, num_prompts=2,
        )  # fmt: skip
