"""${message}

Also: set `HEAD` and `SCHEMA` in autofuse/store/revision.py, update the rows of `meta` below, freeze a database of the old
schema for the tests, and write a line in the changelog.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}
    # op.execute("UPDATE meta SET value = 'N' WHERE key = 'schema'"); and oldest_reader, oldest_writer if they change


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
