BEGIN TRANSACTION;
CREATE TABLE autofuse_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT autofuse_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "autofuse_alembic_version" VALUES('0002');
CREATE TABLE best (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	protocol TEXT NOT NULL, 
	workload_id INTEGER NOT NULL, 
	config_id INTEGER NOT NULL, 
	median_us DOUBLE NOT NULL, 
	verified BOOLEAN NOT NULL, 
	CONSTRAINT pk_best PRIMARY KEY (id), 
	CONSTRAINT fk_best_config_id FOREIGN KEY(config_id) REFERENCES config (id), 
	CONSTRAINT fk_best_device_id FOREIGN KEY(device_id) REFERENCES device (id), 
	CONSTRAINT fk_best_environment_id FOREIGN KEY(environment_id) REFERENCES environment (id), 
	CONSTRAINT fk_best_workload_id FOREIGN KEY(workload_id) REFERENCES workload (id), 
	CONSTRAINT uq_best_device_id_environment_id_protocol_workload_id UNIQUE (device_id, environment_id, protocol, workload_id)
);
INSERT INTO "best" VALUES(1,1,1,'cold',1,1,12.0,1);
CREATE TABLE chain (
	id INTEGER NOT NULL, 
	uid VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	graph TEXT NOT NULL, 
	CONSTRAINT pk_chain PRIMARY KEY (id), 
	CONSTRAINT uq_chain_uid UNIQUE (uid)
);
INSERT INTO "chain" VALUES(1,'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','norm_silu','{"nodes":["norm","silu"]}');
INSERT INTO "chain" VALUES(2,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','','{"nodes":["norm"]}');
INSERT INTO "chain" VALUES(3,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','','{"nodes":["silu"]}');
CREATE TABLE chain_segment (
	chain_id INTEGER NOT NULL, 
	part TEXT NOT NULL, 
	segment_id INTEGER NOT NULL, 
	CONSTRAINT pk_chain_segment PRIMARY KEY (chain_id, part), 
	CONSTRAINT fk_chain_segment_chain_id FOREIGN KEY(chain_id) REFERENCES chain (id), 
	CONSTRAINT fk_chain_segment_segment_id FOREIGN KEY(segment_id) REFERENCES chain (id)
);
INSERT INTO "chain_segment" VALUES(1,'0',2);
INSERT INTO "chain_segment" VALUES(1,'0+1',1);
INSERT INTO "chain_segment" VALUES(1,'1',3);
CREATE TABLE config (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	chain_id INTEGER NOT NULL, 
	"plan" TEXT NOT NULL, 
	num_segments INTEGER NOT NULL, 
	CONSTRAINT pk_config PRIMARY KEY (id), 
	CONSTRAINT fk_config_chain_id FOREIGN KEY(chain_id) REFERENCES chain (id), 
	CONSTRAINT uq_config_uid UNIQUE (uid)
);
INSERT INTO "config" VALUES(1,'aa1898d5ed081e50edb79eb37e579d92',1,'[0][1]',2);
INSERT INTO "config" VALUES(2,'b515d1b7643ae8c452444ad8e7b22569',1,'[0+1]',1);
CREATE TABLE config_schedule (
	config_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	schedule_id INTEGER NOT NULL, 
	CONSTRAINT pk_config_schedule PRIMARY KEY (config_id, position), 
	CONSTRAINT fk_config_schedule_config_id FOREIGN KEY(config_id) REFERENCES config (id), 
	CONSTRAINT fk_config_schedule_schedule_id FOREIGN KEY(schedule_id) REFERENCES schedule (id)
);
INSERT INTO "config_schedule" VALUES(1,0,1);
INSERT INTO "config_schedule" VALUES(1,1,2);
INSERT INTO "config_schedule" VALUES(2,0,3);
CREATE TABLE demand (
	id INTEGER NOT NULL, 
	workload_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	tier TEXT NOT NULL, 
	calls BIGINT NOT NULL, 
	seconds DOUBLE NOT NULL, 
	sizes JSON NOT NULL, 
	first_seen DATETIME NOT NULL, 
	last_seen DATETIME NOT NULL, 
	CONSTRAINT pk_demand PRIMARY KEY (id), 
	CONSTRAINT fk_demand_device_id FOREIGN KEY(device_id) REFERENCES device (id), 
	CONSTRAINT fk_demand_workload_id FOREIGN KEY(workload_id) REFERENCES workload (id), 
	CONSTRAINT uq_demand_workload_id_device_id_tier UNIQUE (workload_id, device_id, tier)
);
INSERT INTO "demand" VALUES(1,3,1,'heuristic',10,0.5,'{"s0":4,"s1":4}','2026-12-07 12:14:41.754131','2026-12-07 12:14:41.754131');
CREATE TABLE device (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	vendor TEXT NOT NULL, 
	name TEXT NOT NULL, 
	arch TEXT NOT NULL, 
	sm_count INTEGER NOT NULL, 
	shared_per_sm_bytes INTEGER, 
	shared_per_block_bytes INTEGER, 
	registers_per_sm INTEGER, 
	l2_bytes BIGINT, 
	memory_bytes BIGINT, 
	partition TEXT NOT NULL, 
	peak_bandwidth_gbs DOUBLE, 
	peak_tflops JSON NOT NULL, 
	CONSTRAINT pk_device PRIMARY KEY (id), 
	CONSTRAINT uq_device_uid UNIQUE (uid)
);
INSERT INTO "device" VALUES(1,'dddddddddddddddddddddddddddddddd','nvidia','H200','sm_90',132,NULL,NULL,NULL,NULL,150000000000,'',4000.0,'{}');
CREATE TABLE environment (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	driver TEXT NOT NULL, 
	cuda TEXT NOT NULL, 
	torch TEXT NOT NULL, 
	triton TEXT NOT NULL, 
	compiler TEXT NOT NULL, 
	python TEXT NOT NULL, 
	autofuse TEXT NOT NULL, 
	kernel_source_hash TEXT NOT NULL, 
	CONSTRAINT pk_environment PRIMARY KEY (id), 
	CONSTRAINT uq_environment_uid UNIQUE (uid)
);
INSERT INTO "environment" VALUES(1,'606450fed18bead2ac45d231d7465497','570','12.8','2.9.0','3.5.0','gcc 12','3.11','0.1','k1');
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	CONSTRAINT pk_meta PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','2');
INSERT INTO "meta" VALUES('oldest_reader','1');
INSERT INTO "meta" VALUES('oldest_writer','1');
CREATE TABLE run (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	workload_id INTEGER NOT NULL, 
	protocol TEXT NOT NULL, 
	sampler TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	trials_budget INTEGER NOT NULL, 
	budget_s DOUBLE NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	started DATETIME NOT NULL, 
	ended DATETIME, 
	eager_us DOUBLE, 
	unfused_us DOUBLE, 
	roofline_us DOUBLE, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT ck_run_ended CHECK ((state = 'running') = (ended IS NULL)), 
	CONSTRAINT ck_run_state CHECK (state IN ('running', 'done', 'interrupted', 'failed')), 
	CONSTRAINT fk_run_device_id FOREIGN KEY(device_id) REFERENCES device (id), 
	CONSTRAINT fk_run_environment_id FOREIGN KEY(environment_id) REFERENCES environment (id), 
	CONSTRAINT fk_run_workload_id FOREIGN KEY(workload_id) REFERENCES workload (id), 
	CONSTRAINT uq_run_uid UNIQUE (uid)
);
INSERT INTO "run" VALUES(1,'01a2506d-7a47-73ae-8001-8974ec773eba',1,1,1,'cold','tpe',7,100,60.0,'done','budget','2026-12-07 12:14:41.740690','2026-12-07 12:14:41.751904',24.0,18.0,5.0);
CREATE TABLE schedule (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	chain_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	space_version INTEGER NOT NULL, 
	num_warps INTEGER, 
	num_stages INTEGER, 
	block_rows INTEGER, 
	block_cols INTEGER, 
	rows_per_program INTEGER, 
	form TEXT, 
	math TEXT, 
	threads INTEGER, 
	knobs JSON NOT NULL, 
	CONSTRAINT pk_schedule PRIMARY KEY (id), 
	CONSTRAINT fk_schedule_chain_id FOREIGN KEY(chain_id) REFERENCES chain (id), 
	CONSTRAINT uq_schedule_uid UNIQUE (uid)
);
INSERT INTO "schedule" VALUES(1,'9af3e2abf28edec7cfd39dc24e38b074',2,'rowreduce',1,8,NULL,NULL,NULL,NULL,'looped',NULL,NULL,'{"form":"looped","num_warps":8}');
INSERT INTO "schedule" VALUES(2,'f57a108b2a1d81f1237dbcdf288c4bc7',3,'rowreduce',1,2,NULL,NULL,NULL,NULL,'looped',NULL,NULL,'{"form":"looped","num_warps":2}');
INSERT INTO "schedule" VALUES(3,'ba99b32f64b8983f86b2f470fa97ba89',1,'rowreduce',1,4,NULL,NULL,2048,NULL,'looped',NULL,NULL,'{"block_cols":2048,"cache":"evict_first","form":"looped","num_warps":4}');
CREATE TABLE trial (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	run_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	workload_id INTEGER NOT NULL, 
	schedule_id INTEGER, 
	config_id INTEGER, 
	source_hash TEXT NOT NULL, 
	status TEXT NOT NULL, 
	median_us DOUBLE, 
	p20_us DOUBLE, 
	p80_us DOUBLE, 
	samples INTEGER NOT NULL, 
	max_error DOUBLE, 
	eager_error DOUBLE, 
	compile_s DOUBLE, 
	registers INTEGER, 
	spills INTEGER, 
	shared_bytes INTEGER, 
	message TEXT NOT NULL, 
	created DATETIME NOT NULL, 
	CONSTRAINT pk_trial PRIMARY KEY (id), 
	CONSTRAINT ck_trial_ok_has_time CHECK ((status = 'ok') = (median_us IS NOT NULL)), 
	CONSTRAINT ck_trial_status CHECK (status IN ('ok', 'pruned', 'invalid', 'compile_error', 'launch_error', 'timeout', 'out_of_memory', 'incorrect', 'crashed')), 
	CONSTRAINT ck_trial_schedule_or_config CHECK ((schedule_id IS NULL) <> (config_id IS NULL)), 
	CONSTRAINT ck_trial_finite_time CHECK (median_us IS NULL OR (median_us > 0 AND median_us < 1e15)), 
	CONSTRAINT fk_trial_config_id FOREIGN KEY(config_id) REFERENCES config (id), 
	CONSTRAINT fk_trial_run_id FOREIGN KEY(run_id) REFERENCES run (id), 
	CONSTRAINT fk_trial_schedule_id FOREIGN KEY(schedule_id) REFERENCES schedule (id), 
	CONSTRAINT fk_trial_workload_id FOREIGN KEY(workload_id) REFERENCES workload (id), 
	CONSTRAINT uq_trial_run_id_number UNIQUE (run_id, number), 
	CONSTRAINT uq_trial_uid UNIQUE (uid)
);
INSERT INTO "trial" VALUES(1,'01a2506d-7a4e-780a-bf1b-bc6f25a6fecb',1,0,2,1,NULL,'','ok',7.0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,'','2026-12-07 12:14:41.744183');
INSERT INTO "trial" VALUES(2,'01a2506d-7a52-742a-be3c-3710951a7d91',1,1,1,NULL,1,'','ok',12.0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,'','2026-12-07 12:14:41.748187');
INSERT INTO "trial" VALUES(3,'01a2506d-7a54-7e20-ad20-cbd777230c70',1,2,1,NULL,2,'','incorrect',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,'off by 3 ulp','2026-12-07 12:14:41.750152');
CREATE TABLE workload (
	id INTEGER NOT NULL, 
	uid VARCHAR(36) NOT NULL, 
	family VARCHAR(36) NOT NULL, 
	chain_id INTEGER NOT NULL, 
	dtypes TEXT NOT NULL, 
	layouts TEXT NOT NULL, 
	rows BIGINT NOT NULL, 
	cols BIGINT NOT NULL, 
	d0 BIGINT, 
	d1 BIGINT, 
	d2 BIGINT, 
	d3 BIGINT, 
	extents JSON NOT NULL, 
	flops BIGINT NOT NULL, 
	bytes_min BIGINT NOT NULL, 
	CONSTRAINT pk_workload PRIMARY KEY (id), 
	CONSTRAINT fk_workload_chain_id FOREIGN KEY(chain_id) REFERENCES chain (id), 
	CONSTRAINT uq_workload_uid UNIQUE (uid)
);
INSERT INTO "workload" VALUES(1,'202821b06182c86c856b6b283a47b0e7','36a3b8fdb0dce8dd8f7794fdecd6f192',1,'["float16","float16"]','["row","row"]',1024,4096,64,4096,NULL,NULL,'[64,4096]',33554432,16777216);
INSERT INTO "workload" VALUES(2,'1f1767b82296f8b2a81f81af52b64eed','69cbb5db8ccec2c2a5305b559a76d6d5',2,'["float16","float16"]','["row","row"]',1024,4096,64,4096,NULL,NULL,'[64,4096]',33554432,16777216);
INSERT INTO "workload" VALUES(3,'3e11fecefdcb7889467223ae9f45a620','36a3b8fdb0dce8dd8f7794fdecd6f192',1,'["float16","float16"]','["row","row"]',16,4096,64,4096,NULL,NULL,'[64,4096]',524288,262144);
CREATE INDEX ix_chain_name ON chain (name);
CREATE INDEX ix_chain_segment_segment_id ON chain_segment (segment_id);
CREATE INDEX ix_config_chain_id ON config (chain_id);
CREATE INDEX ix_schedule_chain_id ON schedule (chain_id);
CREATE INDEX ix_workload_chain_id ON workload (chain_id);
CREATE INDEX ix_workload_family ON workload (family);
CREATE INDEX ix_best_config_id ON best (config_id);
CREATE INDEX ix_best_environment_id ON best (environment_id);
CREATE INDEX ix_best_workload_id ON best (workload_id);
CREATE INDEX ix_config_schedule_schedule_id ON config_schedule (schedule_id);
CREATE INDEX ix_run_device_id ON run (device_id);
CREATE INDEX ix_run_environment_id ON run (environment_id);
CREATE INDEX ix_run_workload_id_device_id_environment_id_protocol ON run (workload_id, device_id, environment_id, protocol);
CREATE INDEX ix_trial_config_id ON trial (config_id);
CREATE INDEX ix_trial_schedule_id ON trial (schedule_id);
CREATE INDEX ix_trial_workload_id ON trial (workload_id);
CREATE INDEX ix_demand_device_id ON demand (device_id);
CREATE VIEW v_best AS SELECT b.id AS best_id, c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, b.protocol,
  k.plan, k.num_segments, b.median_us, b.verified, e.torch, e.triton, e.cuda, e.driver, e.autofuse,
  w.uid AS workload_uid, w.family, k.uid AS config_uid, e.uid AS environment_uid

FROM best b
JOIN device d ON d.id = b.device_id
JOIN environment e ON e.id = b.environment_id
JOIN workload w ON w.id = b.workload_id
JOIN chain c ON c.id = w.chain_id
JOIN config k ON k.id = b.config_id;
CREATE VIEW v_history AS SELECT t.id AS trial_id, t.uid AS trial_uid, t.run_id, t.number, t.created, rc.name AS chain, rc.uid AS chain_key,
  CASE WHEN t.config_id IS NULL THEN 'segment' ELSE 'config' END AS measured,
  c.name AS measured_chain, c.uid AS measured_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, r.protocol, r.sampler, r.seed,
  t.status, t.median_us, t.p20_us, t.p80_us, t.samples, t.max_error, t.eager_error,
  s.kind, s.num_warps, s.num_stages, s.block_rows, s.block_cols, s.rows_per_program, s.form, s.math, s.threads, s.knobs,
  k.plan, k.num_segments, t.compile_s, t.registers, t.spills, t.shared_bytes, t.source_hash, t.message,
  e.torch, e.triton, e.cuda, e.driver, e.autofuse, w.uid AS workload_uid, s.uid AS schedule_uid, k.uid AS config_uid,
  e.uid AS environment_uid, r.uid AS run_uid

FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN environment e ON e.id = r.environment_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id

JOIN workload rw ON rw.id = r.workload_id
JOIN chain rc ON rc.id = rw.chain_id
LEFT JOIN schedule s ON s.id = t.schedule_id
LEFT JOIN config k ON k.id = t.config_id;
CREATE VIEW v_segment_best AS SELECT x.*, (SELECT count(DISTINCT cs.chain_id) FROM chain_segment cs WHERE cs.segment_id = x.chain_id) AS num_chains
FROM (
SELECT t.id AS trial_id, c.id AS chain_id, c.name AS segment, c.uid AS segment_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, r.protocol,
  t.median_us, t.p20_us, t.p80_us, s.kind, s.num_warps, s.num_stages, s.block_rows, s.block_cols, s.rows_per_program,
  s.form, s.math, s.threads, s.knobs, e.torch, e.triton, e.cuda, e.driver, w.uid AS workload_uid, s.uid AS schedule_uid,
  e.uid AS environment_uid,
  row_number() OVER (PARTITION BY r.device_id, r.environment_id, r.protocol, t.workload_id
                     ORDER BY t.median_us, t.id) AS place

FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN environment e ON e.id = r.environment_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id

JOIN schedule s ON s.id = t.schedule_id
WHERE t.status = 'ok') x
WHERE x.place = 1;
CREATE VIEW v_speedup AS SELECT x.*, x.eager_us / x.median_us AS speedup_vs_eager, x.unfused_us / x.median_us AS speedup_vs_unfused
FROM (
SELECT c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, b.protocol, k.plan, k.num_segments, b.median_us,
  (SELECT r.eager_us FROM run r
  WHERE r.workload_id = b.workload_id AND r.device_id = b.device_id AND r.environment_id = b.environment_id
    AND r.protocol = b.protocol AND r.eager_us IS NOT NULL
  ORDER BY r.started DESC, r.id DESC LIMIT 1) AS eager_us,
  (SELECT r.unfused_us FROM run r
  WHERE r.workload_id = b.workload_id AND r.device_id = b.device_id AND r.environment_id = b.environment_id
    AND r.protocol = b.protocol AND r.unfused_us IS NOT NULL
  ORDER BY r.started DESC, r.id DESC LIMIT 1) AS unfused_us,
  b.verified, e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid

FROM best b
JOIN device d ON d.id = b.device_id
JOIN environment e ON e.id = b.environment_id
JOIN workload w ON w.id = b.workload_id
JOIN chain c ON c.id = w.chain_id
JOIN config k ON k.id = b.config_id
) x;
CREATE VIEW v_roofline AS SELECT x.*, x.roofline_us / x.median_us AS roofline_share, x.achieved_gbs / x.peak_bandwidth_gbs AS bandwidth_share
FROM (
SELECT c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, b.protocol, k.plan, k.num_segments, b.median_us,
  (SELECT r.roofline_us FROM run r
  WHERE r.workload_id = b.workload_id AND r.device_id = b.device_id AND r.environment_id = b.environment_id
    AND r.protocol = b.protocol AND r.roofline_us IS NOT NULL
  ORDER BY r.started DESC, r.id DESC LIMIT 1) AS roofline_us,
  w.bytes_min, w.flops, w.bytes_min / b.median_us / 1e3 AS achieved_gbs, d.peak_bandwidth_gbs,
  w.flops / b.median_us / 1e6 AS achieved_tflops, e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid

FROM best b
JOIN device d ON d.id = b.device_id
JOIN environment e ON e.id = b.environment_id
JOIN workload w ON w.id = b.workload_id
JOIN chain c ON c.id = w.chain_id
JOIN config k ON k.id = b.config_id
) x;
CREATE VIEW v_fusion AS SELECT x.*, x.fused_us / x.split_us AS split_speedup,
  CASE WHEN x.fused_us IS NULL OR x.split_us IS NULL THEN NULL
       WHEN x.split_us < x.fused_us THEN 'split' ELSE 'fused' END AS winner
FROM (
SELECT c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, r.protocol,
  min(CASE WHEN k.num_segments = 1 AND k.plan <> 'eager' THEN t.median_us END) AS fused_us,
  min(CASE WHEN k.num_segments > 1 THEN t.median_us END) AS split_us,
  min(CASE WHEN k.plan = 'eager' THEN t.median_us END) AS eager_us,
  e.torch, e.triton, w.uid AS workload_uid, e.uid AS environment_uid

FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN environment e ON e.id = r.environment_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id

JOIN config k ON k.id = t.config_id
WHERE t.status = 'ok'
GROUP BY c.id, c.name, c.uid, w.id, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, w.uid, d.id, d.name, d.uid, d.arch, r.protocol, e.id, e.torch, e.triton,
  e.uid) x;
CREATE VIEW v_invalid AS SELECT x.*, CAST(x.trials AS DOUBLE PRECISION) / x.all_trials AS share
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
WHERE x.status <> 'ok';
CREATE VIEW v_regression AS SELECT x.*, x.median_us / x.previous_us AS change,
  CASE WHEN x.p20_us > x.previous_p80_us THEN 'slower' ELSE 'faster' END AS verdict
FROM (
SELECT y.*, lag(y.median_us) OVER same AS previous_us, lag(y.p20_us) OVER same AS previous_p20_us,
  lag(y.p80_us) OVER same AS previous_p80_us, lag(y.torch) OVER same AS previous_torch,
  lag(y.triton) OVER same AS previous_triton, lag(y.driver) OVER same AS previous_driver,
  lag(y.environment_uid) OVER same AS previous_environment_uid
FROM (
SELECT c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, r.protocol, k.plan, k.num_segments,
  avg(t.median_us) AS median_us, min(coalesce(t.p20_us, t.median_us)) AS p20_us,
  max(coalesce(t.p80_us, t.median_us)) AS p80_us, min(t.created) AS first_seen, e.torch, e.triton, e.driver,
  e.uid AS environment_uid, w.uid AS workload_uid, k.uid AS config_uid

FROM trial t
JOIN run r ON r.id = t.run_id
JOIN device d ON d.id = r.device_id
JOIN environment e ON e.id = r.environment_id
JOIN workload w ON w.id = t.workload_id
JOIN chain c ON c.id = w.chain_id

JOIN config k ON k.id = t.config_id
WHERE t.status = 'ok'
GROUP BY c.id, c.name, c.uid, w.id, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, w.uid, d.id, d.name, d.uid, d.arch, r.protocol, k.id, k.plan,
  k.num_segments, k.uid, e.id, e.torch, e.triton, e.driver, e.uid) y
WINDOW same AS (PARTITION BY y.device_uid, y.protocol, y.workload_uid, y.config_uid
                ORDER BY y.first_seen, y.environment_uid)) x
WHERE x.p20_us > x.previous_p80_us OR x.p80_us < x.previous_p20_us;
CREATE VIEW v_coverage AS SELECT c.name AS chain, c.uid AS chain_key, w.dtypes, d.name AS device, d.uid AS device_uid, r.protocol, e.torch,
  e.triton, e.uid AS environment_uid, count(DISTINCT w.id) AS workloads, count(DISTINCT b.workload_id) AS
  tuned_workloads, min(w.rows) AS min_rows, max(w.rows) AS max_rows, min(w.cols) AS min_cols, max(w.cols) AS max_cols,
  count(DISTINCT r.id) AS runs, count(DISTINCT CASE WHEN r.state = 'done' THEN r.id END) AS done_runs, CAST(sum((SELECT
  count(*) FROM trial t WHERE t.run_id = r.id)) AS BIGINT) AS trials, max(r.started) AS last_started FROM run r JOIN
  device d ON d.id = r.device_id JOIN environment e ON e.id = r.environment_id JOIN workload w ON w.id = r.workload_id
  JOIN chain c ON c.id = w.chain_id LEFT JOIN best b ON b.workload_id = w.id AND b.device_id = d.id AND
  b.environment_id = e.id AND b.protocol = r.protocol GROUP BY c.id, c.name, c.uid, w.dtypes, d.id, d.name, d.uid,
  r.protocol, e.id, e.torch, e.triton, e.uid;
CREATE VIEW v_demand AS SELECT x.*, CASE WHEN x.seconds > x.bound_s THEN x.seconds - x.bound_s ELSE 0.0 END AS lost_s
FROM (
SELECT m.id AS demand_id, c.name AS chain, c.uid AS chain_key, w.rows, w.cols, w.d0, w.d1, w.d2, w.d3, w.dtypes, w.layouts, d.name AS device, d.uid AS device_uid, d.arch, m.tier, m.calls, m.seconds,
  m.calls * (w.bytes_min / (coalesce(d.peak_bandwidth_gbs, CASE d.vendor WHEN 'cpu' THEN 500.0 ELSE 8000.0 END) * 1e9))
  AS bound_s, m.sizes, m.first_seen, m.last_seen, w.uid AS workload_uid
FROM demand m
JOIN device d ON d.id = m.device_id
JOIN workload w ON w.id = m.workload_id
JOIN chain c ON c.id = w.chain_id) x;
COMMIT;
