"""The exceptions that autofuse raises.

AutofuseError
├── TraceError            the function cannot become a chain (also a TypeError's cousin: the message names op and line)
│   └── UnsupportedOp     an operation that no kernel kind lowers yet
├── Infeasible            a plan or a schedule that is not legal here; the search reads it as "pruned"
├── BuildError            generated source that the compiler refused
├── LaunchError           a built kernel that could not be loaded or launched
├── MissError             no tuned kernel, and AUTOFUSE_ON_MISS=error asked for one
├── InputError            bad input of a user: a job file, an option, an argument, an environment variable
├── StoreError            the database cannot be opened, read or written
│   ├── StoreNewer        its schema is newer than this autofuse can read
│   └── StoreCorrupt      the file is no SQLite database, or is damaged
└── WorkerError           the measuring process could not be started or answered nonsense
"""

from __future__ import annotations


class AutofuseError(Exception):
    """Root of every error that autofuse raises on purpose."""


class TraceError(AutofuseError):
    """The function cannot become a chain; the message says where and what to do."""


class UnsupportedOp(TraceError):
    """An operation that no kernel kind lowers yet; the message names it and the line that calls it."""


class Infeasible(AutofuseError):
    """A plan or schedule that is not legal for this chain, device or extent."""


class BuildError(AutofuseError):
    """A compiler refused generated source; the message ends with the compiler's own last line."""


class LaunchError(AutofuseError):
    """A built kernel could not be loaded or launched."""


class MissError(AutofuseError):
    """The store has no tuned kernel for a call, and AUTOFUSE_ON_MISS=error asked for one."""


class InputError(AutofuseError):
    """Bad input of a user: the message names the option, key or argument and what it may be."""


class StoreError(AutofuseError):
    """The database cannot be opened, read or written; the message says what to do."""


class StoreNewer(StoreError):
    """The database was written by a newer autofuse; the message names the upgrade."""


class StoreCorrupt(StoreError):
    """The file is damaged or no SQLite database at all."""


class WorkerError(AutofuseError):
    """The measuring process could not be started, or answered nonsense."""
