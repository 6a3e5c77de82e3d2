"""Laws of identity, split and order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.data.dataset import Dataset, split_rows
from stages.data.order import prompts_for_iteration
from stages.data.rows import PromptRow, content_digest

sizes = st.integers(2, 40)
seeds = st.integers(0, 2**62)


def rows(size: int) -> tuple[PromptRow, ...]:
    return tuple(
        PromptRow(prompt_id=f"e/{number}", environment="e", prompt=str(number), answer="1") for number in range(size)
    )


@settings(deadline=None)
@given(sizes, seeds, st.floats(0, 0.49), st.randoms(use_true_random=False))
def test_split_is_a_partition_that_ignores_row_order(size: int, seed: int, fraction: float, random) -> None:
    original = rows(size)
    shuffled = list(original)
    random.shuffle(shuffled)
    train, held_out = split_rows(original, fraction, seed)
    assert sorted(row.prompt_id for row in (*train, *held_out)) == sorted(row.prompt_id for row in original)
    assert len(held_out) == round(size * fraction)
    _, held_out_of_shuffled = split_rows(shuffled, fraction, seed)
    assert {row.prompt_id for row in held_out_of_shuffled} == {row.prompt_id for row in held_out}


@settings(deadline=None)
@given(sizes, seeds, st.data())
def test_epoch_holds_no_prompt_twice_and_any_iteration_is_found_without_the_others(
    size: int, seed: int, data: st.DataObject
) -> None:
    dataset = Dataset(rows(size))
    num_prompts = data.draw(st.integers(1, size))
    epoch = data.draw(st.integers(0, 5))
    per_epoch = size // num_prompts
    iterations = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    batches = {iteration: prompts_for_iteration(dataset, seed, iteration, num_prompts) for iteration in iterations}
    seen = [row.prompt_id for batch in batches.values() for row in batch]
    assert len(seen) == len(set(seen)) == per_epoch * num_prompts
    for iteration in data.draw(st.permutations(list(iterations))):
        assert prompts_for_iteration(Dataset(rows(size)), seed, iteration, num_prompts) == batches[iteration]


@settings(deadline=None)
@given(st.text(), st.text(), st.text() | st.none(), st.text(), st.text(), st.text() | st.none())
def test_content_digests_are_equal_exactly_for_equal_content(
    environment: str,
    prompt: str,
    answer: str | None,
    other_environment: str,
    other_prompt: str,
    other_answer: str | None,
) -> None:
    # Joined text would confuse ("ab", "c") with ("a", "bc").
    one, other = (environment, prompt, answer), (other_environment, other_prompt, other_answer)
    assert (content_digest(*one) == content_digest(*other)) == (one == other)
