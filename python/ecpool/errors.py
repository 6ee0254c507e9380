"""The exceptions ecpool raises.

Each one is also the built-in exception that a caller would expect, so ``except KeyError`` and
``except ValueError`` keep working. The native module maps its errors to these in one table
(``rust/py/src/error.rs``).
"""


class EcpoolError(Exception):
    """Base of everything ecpool raises on purpose."""


class InvalidArgumentError(EcpoolError, ValueError):
    """An argument or setting is not allowed; the message says what is."""


class KeyNotFoundError(EcpoolError, KeyError):
    """No entry of this key is in the cache."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class EntryStateError(EcpoolError, RuntimeError):
    """The entry exists but is not in the state that the call needs."""


class TooLargeError(EcpoolError, ValueError):
    """More blocks than the whole cache has."""


class NoSpaceError(EcpoolError, OSError):
    """The host cannot hold a region of this size; the message names the tightest limit."""


class RegionError(EcpoolError, OSError):
    """A region's file cannot be created, opened or mapped."""


class RegionFormatError(RegionError):
    """A file is not a region that this version of ecpool can use."""


class PoolBusyError(EcpoolError, TimeoutError):
    """The region's lock was not free within the deadline, or every record of a kind is in use."""


class ClosedError(EcpoolError, RuntimeError):
    """The region was closed, or this process is a fork of the one that opened it."""
