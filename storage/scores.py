"""Scores that other rewards gave to committed completions: which rewards they were.

A name stands for one set of rewards for good: the first iteration that is scored writes the document, and whoever
comes with other rewards under the same name is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from storage.documents import model_bytes, publish_once
from storage.errors import AlreadyPublishedError, InvalidInputError
from storage.layout import SCORES_NAME, Split, partition_folder
from storage.store import Store

SCORES_FORMAT = "motley.scores/1"


class ScoresRecord(BaseModel):
    """The document ``scores.json``: what the scores beside it were made with."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["motley.scores/1"] = "motley.scores/1"
    """Kind and version of this document."""
    run: str
    """Run whose completions were scored."""
    split: Split
    """Train or eval."""
    rewards: dict[str, Any]
    """Section ``rewards``, resolved."""


def claim_scores(store: Store, folder: str, record: ScoresRecord) -> None:
    """Say what a folder's scores are made with; saying the same again is success.

    Args:
        store: Where the scores go.
        folder: Root of the hive-partitioned dataset; empty = the store's own root.
        record: What they are made with.

    Raises:
        InvalidInputError: Scores of other rewards, or of the other split, lie there.
    """
    key = f"{folder}/{partition_folder(record.run)}/{SCORES_NAME}".removeprefix("/")
    try:
        publish_once(store, key, model_bytes(record, key), "set of rewards")
    except AlreadyPublishedError as error:
        message = (
            f"{store.url}/{key}: scores of run {record.run} by other rewards or of another split lie there, and one "
            "place holds one kind; choose another name or folder"
        )
        raise InvalidInputError(message, key=key) from error
