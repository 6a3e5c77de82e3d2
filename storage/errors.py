"""Every error that storage raises: one tree, whose branches say who can act.

A message names what failed, where (the object key), what was found, what is allowed and what to do. Foreign
exceptions (fsspec, botocore, operating system) never leave the package: ``storage.store`` maps them.
"""

from __future__ import annotations


class StorageError(Exception):
    """Root of all storage errors."""

    key: str | None
    """Object key (relative to the store's root) that the error is about; ``None`` if it is about no single object."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        """Keep the message and the key.

        Args:
            message: A complete sentence: what, where, value found, rule, remedy.
            key: Object key that the error is about.
        """
        super().__init__(message)
        self.key = key


class TransientStorageError(StorageError):
    """The store is throttling, unreachable for a moment or answered 5xx; the same call may succeed later."""


class TransferDeadlineError(TransientStorageError):
    """A transfer did not end in time; what arrived is kept and the next try goes on from there."""


class ObjectMissingError(StorageError):
    """An object or manifest that must exist does not."""


class CorruptObjectError(StorageError):
    """An object exists but its size, digest, rows, structure or content breaks its contract."""


class DeltaMismatchError(CorruptObjectError):
    """A weight delta does not belong to its base, breaks its chain or does not give the promised tensors."""


class DuplicateRowError(CorruptObjectError):
    """Two rows of one data set carry the same row id."""


class SchemaVersionError(StorageError):
    """An object was written by newer code than this one."""


class AlreadyPublishedError(StorageError):
    """Other content is already committed for the same inputs; the committed content stands."""


class StoreAccessError(StorageError):
    """The store refuses or cannot be used; an operator must act, retrying does not help."""


class BucketMissingError(StoreAccessError):
    """The bucket or root folder does not exist."""


class CredentialsError(StoreAccessError):
    """Credentials are missing, wrong or expired."""


class PermissionDeniedError(StoreAccessError):
    """The credentials are good but may not do this."""


class StoreFullError(StoreAccessError):
    """No space or quota left."""


class UnsupportedStoreError(StoreAccessError):
    """The URL names a protocol that is unknown or whose package is not installed."""


class InvalidInputError(StorageError, ValueError):
    """The caller passed data that must not be stored."""


class InvalidNameError(InvalidInputError):
    """A name could escape its folder or cannot be an object key."""


class RunNotEmptyError(StorageError):
    """A new run was asked for where a run's objects already lie; resuming must be explicit."""


class PolicyVersionError(StorageError):
    """A policy version would go backwards without a rollback record."""


class ResumeMismatchError(StorageError):
    """A resume point belongs to another configuration or another data set."""
