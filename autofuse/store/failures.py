"""What a database's own error means for the user: one sentence that says what to do. Knows messages, no driver."""

from __future__ import annotations

from ..errors import StoreCorrupt, StoreError


def explain(error: BaseException, where: str) -> StoreError:
    """The StoreError (or StoreCorrupt) that stands for a driver's `error` on the database `where`."""
    text = " ".join(str(error).split())
    low = text.lower()
    # Not "malformed" alone: a user's query can hit malformed JSON in a sound database.
    if any(sign in low for sign in ("not a database", "disk image", "malformed database schema", "file is encrypted")):
        return StoreCorrupt(
            f"{where} is damaged or no SQLite database ({text}): move it aside (its name with `.corrupt` added), then "
            "restore a backup, or let the next tuning job start a new one."
        )
    if "connect" in low or "password" in low:
        return StoreError(f"{where} cannot be reached ({text}): check the URL in AUTOFUSE_STORE and that the server runs.")
    if "readonly" in low or "read-only" in low or "permission denied" in low:
        return StoreError(
            f"{where} is read-only ({text}): make the file and its folder writable, or name another database in AUTOFUSE_STORE."
        )
    if "locked" in low or "busy" in low or "deadlock" in low or "could not obtain lock" in low:
        return StoreError(f"{where} is locked by another process ({text}): end that process, or try again later.")
    if "disk is full" in low or "disk full" in low or "no space" in low:
        return StoreError(f"{where} cannot grow ({text}): free some space on its disk, then start again.")
    if "unable to open" in low:
        return StoreError(f"{where} cannot be opened ({text}): check that its folder exists and that you may write there.")
    if "no such table" in low or "no such column" in low or "does not exist" in low or "already exists" in low:
        return StoreError(
            f"{where} does not have the tables that autofuse expects ({text}): open it once for writing to upgrade it, "
            "or name another database in AUTOFUSE_STORE."
        )
    if "constraint" in low:
        return StoreError(f"{where} refused a row that breaks a rule of its tables ({text}): report this as a bug.")
    return StoreError(f"{where} failed ({text}): check the database, then start again.")
