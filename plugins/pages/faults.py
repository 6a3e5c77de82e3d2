"""What a page says instead of content: one sentence, with the status that goes with it."""

from __future__ import annotations

from http import HTTPStatus

from plans.errors import PlanningError
from stages.errors import StageError
from storage.errors import InvalidInputError, ObjectMissingError, StorageError, TransientStorageError


class PageError(Exception):
    """A page can't be shown; the message is a sentence for the person who asked for it."""

    status: HTTPStatus
    """Status of the answer."""

    def __init__(self, sentence: str, status: HTTPStatus = HTTPStatus.NOT_FOUND) -> None:
        """Keep the sentence and the status."""
        super().__init__(sentence)
        self.status = status


def page_error(error: Exception) -> PageError | None:
    """Return an error, also one of the layers below, as what a page says; None for one that nobody foresaw."""
    if isinstance(error, PageError):
        return error
    if not isinstance(error, StorageError | PlanningError | StageError):
        return None
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, ObjectMissingError):
        status = HTTPStatus.NOT_FOUND
    elif isinstance(error, InvalidInputError):
        status = HTTPStatus.BAD_REQUEST
    elif isinstance(error, TransientStorageError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return PageError(str(error), status)
