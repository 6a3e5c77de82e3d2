"""Orders and identities that stored runs depend on: a change here makes old runs impossible to resume."""

from __future__ import annotations

from stages.data.dataset import load_dataset
from stages.data.order import prompts_for_iteration
from stages.data.rows import content_digest
from stages.data.spec import DataSpec


def test_content_digest_is_the_hash_of_the_canonical_json() -> None:
    # printf '["e","2+2?","4"]' | sha256sum | cut -c1-32
    assert content_digest("e", "2+2?", "4") == CONTENT_DIGEST


def test_first_prompts_of_the_quickstart_data_stay_the_same() -> None:
    train = load_dataset(DataSpec(source="arithmetic:addition")).train
    assert train.fingerprint == FINGERPRINT
    assert [row.prompt for row in prompts_for_iteration(train, 0, 3, 4)] == PROMPTS


CONTENT_DIGEST = "b3ab7aa1077d0d9ee8a05787ebcd4baa"
FINGERPRINT = "90bc4f4b6b62bb7bcfe97cf4c84a3ccb2176472ad6012fee2b07e2b75158421c"
PROMPTS = ["93+42=", "02+37=", "01+32=", "23+60="]
