"""Views for people who write SQL: names in place of ids. They are dropped before a migration touches their tables and
made again after it, so a changed view needs a revision too (an empty one will do).

The SQL is the common ground of SQLite (3.31 and newer) and PostgreSQL. Times of different protocols, devices or
environments are never compared, except where a view is about just that.
"""

from __future__ import annotations

from sqlalchemy import Connection

# What one measures for: the columns that a person reads first, the same in every view.
_PLACE = "d.name AS device, d.uid AS device_uid, d.arch"
_SHAPE = "w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts"

_BEST_FROM = """
FROM best b
JOIN device d ON d.id = b.device_id
JOIN environment e ON e.id = b.environment_id
JOIN workload w ON w.id = b.workload_id
JOIN chain c ON c.id = w.chain_id
JOIN config k ON k.id = b.config_id
"""


def _latest_of_run(column: str) -> str:
    """The column of the newest run that has it, of the same device, environment, protocol and workload as `b`."""
    return f"""(SELECT r.{column} FROM run r
  WHERE r.workload_id = b.workload_id AND r.device_id = b.device_id AND r.environment_id = b.environment_id
    AND r.protocol = b.protocol AND r.{column} IS NOT NULL
  ORDER BY r.started DESC, r.id DESC LIMIT 1)"""


_TRIAL_FROM = """
FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN environment e ON e.id = r.environment_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id
"""

VIEWS: dict[str, str] = {
    # The winners: one row for each workload, device, environment and protocol.
    "v_best": f"""
SELECT b.id AS best_id, c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, b.protocol,
  k.plan, k.num_segments, b.median_us, b.verified, e.torch, e.triton, e.cuda, e.driver, e.autofuse,
  w.uid AS workload_uid, w.family, k.uid AS config_uid, e.uid AS environment_uid
{_BEST_FROM}""",
    # Every trial. `chain` is what the run was about, `measured` what this trial measured: the chain or a segment of it.
    "v_history": f"""
SELECT t.id AS trial_id, t.uid AS trial_uid, t.run_id, t.number, t.created, rc.name AS chain, rc.uid AS chain_key,
  CASE WHEN t.config_id IS NULL THEN 'segment' ELSE 'config' END AS measured,
  c.name AS measured_chain, c.uid AS measured_key, {_SHAPE}, {_PLACE}, r.protocol, r.sampler, r.seed,
  t.status, t.median_us, t.p20_us, t.p80_us, t.samples, t.max_error, t.eager_error,
  s.kind, s.num_warps, s.num_stages, s.block_rows, s.block_cols, s.rows_per_program, s.form, s.math, s.threads, s.knobs,
  k.plan, k.num_segments, t.compile_s, t.registers, t.spills, t.shared_bytes, t.source_hash, t.message,
  e.torch, e.triton, e.cuda, e.driver, e.autofuse, w.uid AS workload_uid, s.uid AS schedule_uid, k.uid AS config_uid,
  e.uid AS environment_uid, r.uid AS run_uid
{_TRIAL_FROM}
JOIN workload rw ON rw.id = r.workload_id
JOIN chain rc ON rc.id = rw.chain_id
LEFT JOIN schedule s ON s.id = t.schedule_id
LEFT JOIN config k ON k.id = t.config_id""",
    # The fastest single trial of each segment workload. `num_chains`: in how many chains the segment occurs.
    "v_segment_best": f"""
SELECT x.*, (SELECT count(DISTINCT cs.chain_id) FROM chain_segment cs WHERE cs.segment_id = x.chain_id) AS num_chains
FROM (
SELECT t.id AS trial_id, c.id AS chain_id, c.name AS segment, c.uid AS segment_key, {_SHAPE}, {_PLACE}, r.protocol,
  t.median_us, t.p20_us, t.p80_us, s.kind, s.num_warps, s.num_stages, s.block_rows, s.block_cols, s.rows_per_program,
  s.form, s.math, s.threads, s.knobs, e.torch, e.triton, e.cuda, e.driver, w.uid AS workload_uid, s.uid AS schedule_uid,
  e.uid AS environment_uid,
  row_number() OVER (PARTITION BY r.device_id, r.environment_id, r.protocol, t.workload_id
                     ORDER BY t.median_us, t.id) AS place
{_TRIAL_FROM}
JOIN schedule s ON s.id = t.schedule_id
WHERE t.status = 'ok') x
WHERE x.place = 1""",
    # The winners against eager and against every op in a kernel of its own, as the newest run measured those.
    "v_speedup": f"""
SELECT x.*, x.eager_us / x.median_us AS speedup_vs_eager, x.unfused_us / x.median_us AS speedup_vs_unfused
FROM (
SELECT c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, b.protocol, k.plan, k.num_segments, b.median_us,
  {_latest_of_run("eager_us")} AS eager_us,
  {_latest_of_run("unfused_us")} AS unfused_us,
  b.verified, e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid
{_BEST_FROM}) x""",
    # How near the winners come to what the device can do: 1.0 is the bound.
    "v_roofline": f"""
SELECT x.*, x.roofline_us / x.median_us AS roofline_share, x.achieved_gbs / x.peak_bandwidth_gbs AS bandwidth_share
FROM (
SELECT c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, b.protocol, k.plan, k.num_segments, b.median_us,
  {_latest_of_run("roofline_us")} AS roofline_us,
  w.bytes_min, w.flops, w.bytes_min / b.median_us / 1e3 AS achieved_gbs, d.peak_bandwidth_gbs,
  w.flops / b.median_us / 1e6 AS achieved_tflops, e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid
{_BEST_FROM}) x""",
    # Where splitting beats fusing: the fastest plan of one segment against the fastest of several. Eager is neither.
    "v_fusion": f"""
SELECT x.*, x.fused_us / x.split_us AS split_speedup,
  CASE WHEN x.fused_us IS NULL OR x.split_us IS NULL THEN NULL
       WHEN x.split_us < x.fused_us THEN 'split' ELSE 'fused' END AS winner
FROM (
SELECT c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, r.protocol,
  min(CASE WHEN k.num_segments = 1 AND k.plan <> 'eager' THEN t.median_us END) AS fused_us,
  min(CASE WHEN k.num_segments > 1 THEN t.median_us END) AS split_us,
  min(CASE WHEN k.plan = 'eager' THEN t.median_us END) AS eager_us,
  e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid
{_TRIAL_FROM}
JOIN config k ON k.id = t.config_id
WHERE t.status = 'ok'
GROUP BY c.id, c.name, c.uid, w.id, {_SHAPE}, w.uid, d.id, d.name, d.uid, d.arch, r.protocol, e.id, e.torch, e.triton,
  e.uid) x""",
    # What could not be used and why. `share` is of all trials of that kind of kernel, chain and device.
    "v_invalid": """
SELECT x.*, CAST(x.trials AS DOUBLE PRECISION) / x.all_trials AS share
FROM (
SELECT d.name AS device, d.uid AS device_uid, c.name AS chain, c.uid AS chain_key, coalesce(s.kind, 'config') AS kind,
  t.status, count(*) AS trials,
  CAST(sum(count(*)) OVER (PARTITION BY d.id, c.id, coalesce(s.kind, 'config')) AS BIGINT) AS all_trials,
  min(t.message) AS example_message, max(t.created) AS last_seen
FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id
LEFT JOIN schedule s ON s.id = t.schedule_id
GROUP BY d.id, d.name, d.uid, c.id, c.name, c.uid, coalesce(s.kind, 'config'), t.status) x
WHERE x.status <> 'ok'""",
    # The same config and workload in consecutive environments (by first use), where the intervals p20 to p80 are apart.
    "v_regression": f"""
SELECT x.*, x.median_us / x.previous_us AS change,
  CASE WHEN x.p20_us > x.previous_p80_us THEN 'slower' ELSE 'faster' END AS verdict
FROM (
SELECT y.*, lag(y.median_us) OVER same AS previous_us, lag(y.p20_us) OVER same AS previous_p20_us,
  lag(y.p80_us) OVER same AS previous_p80_us, lag(y.torch) OVER same AS previous_torch,
  lag(y.triton) OVER same AS previous_triton, lag(y.driver) OVER same AS previous_driver,
  lag(y.environment_uid) OVER same AS previous_environment_uid
FROM (
SELECT c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, r.protocol, k.plan, k.num_segments,
  avg(t.median_us) AS median_us, min(coalesce(t.p20_us, t.median_us)) AS p20_us,
  max(coalesce(t.p80_us, t.median_us)) AS p80_us, min(t.created) AS first_seen, e.torch, e.triton, e.driver,
  e.uid AS environment_uid, w.uid AS workload_uid, k.uid AS config_uid
{_TRIAL_FROM}
JOIN config k ON k.id = t.config_id
WHERE t.status = 'ok'
GROUP BY c.id, c.name, c.uid, w.id, {_SHAPE}, w.uid, d.id, d.name, d.uid, d.arch, r.protocol, k.id, k.plan,
  k.num_segments, k.uid, e.id, e.torch, e.triton, e.driver, e.uid) y
WINDOW same AS (PARTITION BY y.device_uid, y.protocol, y.workload_uid, y.config_uid
                ORDER BY y.first_seen, y.environment_uid)) x
WHERE x.p20_us > x.previous_p80_us OR x.p80_us < x.previous_p20_us""",
    # What has been tuned: one row for each chain, dtypes, device and environment with a run.
    "v_coverage": """
SELECT c.name AS chain, c.uid AS chain_key, w.dtypes, d.name AS device, d.uid AS device_uid, r.protocol, e.torch,
  e.triton, e.uid AS environment_uid, count(DISTINCT w.id) AS workloads, count(DISTINCT b.workload_id) AS
  tuned_workloads, min(w.rows) AS min_rows, max(w.rows) AS max_rows, min(w.cols) AS min_cols, max(w.cols) AS max_cols,
  count(DISTINCT r.id) AS runs, count(DISTINCT CASE WHEN r.state = 'done' THEN r.id END) AS done_runs, CAST(sum((SELECT
  count(*) FROM trial t WHERE t.run_id = r.id)) AS BIGINT) AS trials, max(r.started) AS last_started FROM run r JOIN
  device d ON d.id = r.device_id JOIN environment e ON e.id = r.environment_id JOIN workload w ON w.id = r.workload_id
  JOIN chain c ON c.id = w.chain_id LEFT JOIN best b ON b.workload_id = w.id AND b.device_id = d.id AND
  b.environment_id = e.id AND b.protocol = r.protocol GROUP BY c.id, c.name, c.uid, w.dtypes, d.id, d.name, d.uid,
  r.protocol, e.id, e.torch, e.triton, e.uid""",
    # What was called without being tuned. `bound_s`: its calls at the bandwidth that was measured on the device, or, where
    # none was, at that of the fastest made, so that what is lost is never hidden.
    "v_demand": f"""
SELECT x.*, CASE WHEN x.seconds > x.bound_s THEN x.seconds - x.bound_s ELSE 0.0 END AS lost_s
FROM (
SELECT m.id AS demand_id, c.name AS chain, c.uid AS chain_key, {_SHAPE}, {_PLACE}, m.tier, m.calls, m.seconds,
  m.calls * (w.bytes_min / (coalesce(d.peak_bandwidth_gbs, CASE d.vendor WHEN 'cpu' THEN 500.0 ELSE 8000.0 END) * 1e9))
  AS bound_s, m.sizes, m.first_seen, m.last_seen, w.uid AS workload_uid
FROM demand m
JOIN device d ON d.id = m.device_id
JOIN workload w ON w.id = m.workload_id
JOIN chain c ON c.id = w.chain_id) x""",
}


def create(connection: Connection) -> None:
    """Make all views. The tables must be at the newest schema, and the views not there."""
    for name, sql in VIEWS.items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {sql.strip()}")


def drop(connection: Connection) -> None:
    """Drop all views that are there."""
    for name in reversed(VIEWS):
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
