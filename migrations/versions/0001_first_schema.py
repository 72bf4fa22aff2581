"""The first schema: device, environment, chain, workload, schedule, config, run, trial, best, meta."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "chain",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chain")),
        sa.UniqueConstraint("uid", name=op.f("uq_chain_uid")),
    )
    op.create_index(op.f("ix_chain_name"), "chain", ["name"], unique=False)
    op.create_table(
        "device",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("vendor", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("shared_per_sm_bytes", sa.Integer(), nullable=True),
        sa.Column("shared_per_block_bytes", sa.Integer(), nullable=True),
        sa.Column("registers_per_sm", sa.Integer(), nullable=True),
        sa.Column("l2_bytes", sa.BigInteger(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("peak_bandwidth_gbs", sa.Double(), nullable=True),
        sa.Column("peak_tflops", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device")),
        sa.UniqueConstraint("uid", name=op.f("uq_device_uid")),
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=False),
        sa.Column("compiler", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("autofuse", sa.Text(), nullable=False),
        sa.Column("kernel_source_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
        sa.UniqueConstraint("uid", name=op.f("uq_environment_uid")),
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_meta")),
    )
    op.create_table(
        "chain_segment",
        sa.Column("chain_id", sa.Integer(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("segment_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["chain_id"], ["chain.id"], name=op.f("fk_chain_segment_chain_id")),
        sa.ForeignKeyConstraint(["segment_id"], ["chain.id"], name=op.f("fk_chain_segment_segment_id")),
        sa.PrimaryKeyConstraint("chain_id", "part", name=op.f("pk_chain_segment")),
    )
    op.create_index(op.f("ix_chain_segment_segment_id"), "chain_segment", ["segment_id"], unique=False)
    op.create_table(
        "config",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("chain_id", sa.Integer(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("num_segments", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["chain_id"], ["chain.id"], name=op.f("fk_config_chain_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_config")),
        sa.UniqueConstraint("uid", name=op.f("uq_config_uid")),
    )
    op.create_index(op.f("ix_config_chain_id"), "config", ["chain_id"], unique=False)
    op.create_table(
        "schedule",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("chain_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("space_version", sa.Integer(), nullable=False),
        sa.Column("num_warps", sa.Integer(), nullable=True),
        sa.Column("num_stages", sa.Integer(), nullable=True),
        sa.Column("block_rows", sa.Integer(), nullable=True),
        sa.Column("block_cols", sa.Integer(), nullable=True),
        sa.Column("rows_per_program", sa.Integer(), nullable=True),
        sa.Column("form", sa.Text(), nullable=True),
        sa.Column("math", sa.Text(), nullable=True),
        sa.Column("threads", sa.Integer(), nullable=True),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["chain_id"], ["chain.id"], name=op.f("fk_schedule_chain_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schedule")),
        sa.UniqueConstraint("uid", name=op.f("uq_schedule_uid")),
    )
    op.create_index(op.f("ix_schedule_chain_id"), "schedule", ["chain_id"], unique=False)
    op.create_table(
        "workload",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("family", sa.String(length=36), nullable=False),
        sa.Column("chain_id", sa.Integer(), nullable=False),
        sa.Column("dtypes", sa.Text(), nullable=False),
        sa.Column("layouts", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("cols", sa.BigInteger(), nullable=False),
        sa.Column("d0", sa.BigInteger(), nullable=True),
        sa.Column("d1", sa.BigInteger(), nullable=True),
        sa.Column("d2", sa.BigInteger(), nullable=True),
        sa.Column("d3", sa.BigInteger(), nullable=True),
        sa.Column("extents", sa.JSON(), nullable=False),
        sa.Column("flops", sa.BigInteger(), nullable=False),
        sa.Column("bytes_min", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["chain_id"], ["chain.id"], name=op.f("fk_workload_chain_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workload")),
        sa.UniqueConstraint("uid", name=op.f("uq_workload_uid")),
    )
    op.create_index(op.f("ix_workload_chain_id"), "workload", ["chain_id"], unique=False)
    op.create_index(op.f("ix_workload_family"), "workload", ["family"], unique=False)
    op.create_table(
        "best",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_best_config_id")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_best_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_best_environment_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workload.id"], name=op.f("fk_best_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_best")),
        sa.UniqueConstraint(
            "device_id",
            "environment_id",
            "protocol",
            "workload_id",
            name=op.f("uq_best_device_id_environment_id_protocol_workload_id"),
        ),
    )
    op.create_index(op.f("ix_best_config_id"), "best", ["config_id"], unique=False)
    op.create_index(op.f("ix_best_environment_id"), "best", ["environment_id"], unique=False)
    op.create_index(op.f("ix_best_workload_id"), "best", ["workload_id"], unique=False)
    op.create_table(
        "config_schedule",
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("schedule_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_config_schedule_config_id")),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name=op.f("fk_config_schedule_schedule_id")),
        sa.PrimaryKeyConstraint("config_id", "position", name=op.f("pk_config_schedule")),
    )
    op.create_index(op.f("ix_config_schedule_schedule_id"), "config_schedule", ["schedule_id"], unique=False)
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("trials_budget", sa.Integer(), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("eager_us", sa.Double(), nullable=True),
        sa.Column("unfused_us", sa.Double(), nullable=True),
        sa.Column("roofline_us", sa.Double(), nullable=True),
        sa.CheckConstraint("(state = 'running') = (ended IS NULL)", name=op.f("ck_run_ended")),
        sa.CheckConstraint("state IN ('running', 'done', 'interrupted', 'failed')", name=op.f("ck_run_state")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_run_device_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_run_environment_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workload.id"], name=op.f("fk_run_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("uid", name=op.f("uq_run_uid")),
    )
    op.create_index(op.f("ix_run_device_id"), "run", ["device_id"], unique=False)
    op.create_index(op.f("ix_run_environment_id"), "run", ["environment_id"], unique=False)
    op.create_index(
        op.f("ix_run_workload_id_device_id_environment_id_protocol"),
        "run",
        ["workload_id", "device_id", "environment_id", "protocol"],
        unique=False,
    )
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("schedule_id", sa.Integer(), nullable=True),
        sa.Column("config_id", sa.Integer(), nullable=True),
        sa.Column("source_hash", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("p20_us", sa.Double(), nullable=True),
        sa.Column("p80_us", sa.Double(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("max_error", sa.Double(), nullable=True),
        sa.Column("eager_error", sa.Double(), nullable=True),
        sa.Column("compile_s", sa.Double(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spills", sa.Integer(), nullable=True),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("(status = 'ok') = (median_us IS NOT NULL)", name=op.f("ck_trial_ok_has_time")),
        sa.CheckConstraint(
            "status IN ('ok', 'pruned', 'invalid', 'compile_error', 'launch_error', 'timeout', "
            "'out_of_memory', 'incorrect', 'crashed')",
            name=op.f("ck_trial_status"),
        ),
        sa.CheckConstraint("(schedule_id IS NULL) <> (config_id IS NULL)", name=op.f("ck_trial_schedule_or_config")),
        sa.CheckConstraint("median_us IS NULL OR (median_us > 0 AND median_us < 1e15)", name=op.f("ck_trial_finite_time")),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_trial_config_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_trial_run_id")),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name=op.f("fk_trial_schedule_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workload.id"], name=op.f("fk_trial_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_trial_run_id_number")),
        sa.UniqueConstraint("uid", name=op.f("uq_trial_uid")),
    )
    op.create_index(op.f("ix_trial_config_id"), "trial", ["config_id"], unique=False)
    op.create_index(op.f("ix_trial_schedule_id"), "trial", ["schedule_id"], unique=False)
    op.create_index(op.f("ix_trial_workload_id"), "trial", ["workload_id"], unique=False)
    op.execute("INSERT INTO meta (key, value) VALUES ('schema', '1'), ('oldest_reader', '1'), ('oldest_writer', '1')")


def downgrade() -> None:
    op.drop_index(op.f("ix_trial_workload_id"), table_name="trial")
    op.drop_index(op.f("ix_trial_schedule_id"), table_name="trial")
    op.drop_index(op.f("ix_trial_config_id"), table_name="trial")
    op.drop_table("trial")
    op.drop_index(op.f("ix_run_workload_id_device_id_environment_id_protocol"), table_name="run")
    op.drop_index(op.f("ix_run_environment_id"), table_name="run")
    op.drop_index(op.f("ix_run_device_id"), table_name="run")
    op.drop_table("run")
    op.drop_index(op.f("ix_config_schedule_schedule_id"), table_name="config_schedule")
    op.drop_table("config_schedule")
    op.drop_index(op.f("ix_best_workload_id"), table_name="best")
    op.drop_index(op.f("ix_best_environment_id"), table_name="best")
    op.drop_index(op.f("ix_best_config_id"), table_name="best")
    op.drop_table("best")
    op.drop_index(op.f("ix_workload_family"), table_name="workload")
    op.drop_index(op.f("ix_workload_chain_id"), table_name="workload")
    op.drop_table("workload")
    op.drop_index(op.f("ix_schedule_chain_id"), table_name="schedule")
    op.drop_table("schedule")
    op.drop_index(op.f("ix_config_chain_id"), table_name="config")
    op.drop_table("config")
    op.drop_index(op.f("ix_chain_segment_segment_id"), table_name="chain_segment")
    op.drop_table("chain_segment")
    op.drop_table("meta")
    op.drop_table("environment")
    op.drop_table("device")
    op.drop_index(op.f("ix_chain_name"), table_name="chain")
    op.drop_table("chain")
