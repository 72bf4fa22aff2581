"""Demand: what the dispatcher missed. A table and a view beside the others, so that older code may go on using the rest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "demand",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("sizes", sa.JSON(), nullable=False),
        sa.Column("first_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_demand_device_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workload.id"], name=op.f("fk_demand_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_demand")),
        sa.UniqueConstraint("workload_id", "device_id", "tier", name=op.f("uq_demand_workload_id_device_id_tier")),
    )
    op.create_index(op.f("ix_demand_device_id"), "demand", ["device_id"], unique=False)
    op.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")


def downgrade() -> None:
    op.drop_index(op.f("ix_demand_device_id"), table_name="demand")
    op.drop_table("demand")
    op.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
