"""The tables of the pipelines once more, by DuckDB, straight from the segments of a log.

Nothing here is shared with the package: a log is lines of JSON, and each table is one query.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

Rows = list[tuple[Any, ...]]
ORDER = "ts, topic, part, off"


class Recomputed:
    """The records of a log in DuckDB."""

    def __init__(self, root: str) -> None:
        import duckdb

        self.db = duckdb.connect(config={"threads": 2})
        self.db.execute("SET TimeZone = 'UTC'")
        self.db.execute(
            "CREATE TABLE r (topic VARCHAR, part INT, off BIGINT, ts TIMESTAMP, id VARCHAR, "
            "type VARCHAR, actor VARCHAR, space VARCHAR, key VARCHAR, subject VARCHAR, "
            "cause VARCHAR, ttl DOUBLE, value VARCHAR, put BIGINT)"
        )
        for path in sorted(Path(root).glob("wal/*.jsonl")):
            name = path.name.rsplit(".", 2)[0]
            topic, _, part = name.partition("~")
            if not topic.startswith("system."):
                self._load(path, topic, int(part or 0))
        self._keep_passed()

    def _load(self, path: Path, topic: str, part: int) -> None:
        rows = []
        at = None
        text = path.read_text("utf-8").split("\n")
        for line in reversed([one for one in text if one.startswith('{"offset"')]):
            found = re.search(r',"commit":\{"count":\d+,"durable":\d+,"at":(\d+)\}$', line[:-18])
            at = int(found[1]) if found else at
            end = len(line) - 18 - (len(found[0]) if found else 0)
            value = line[line.index('},"payload":') + 12 : end]
            rows.append((line, None if value == "null" else value, at))
        self.db.execute(
            "CREATE OR REPLACE TEMP TABLE lines (line VARCHAR, value VARCHAR, put BIGINT)"
        )
        if rows:
            import pyarrow as pa

            lines, values, times = zip(*rows, strict=True)
            batch = pa.table(  # noqa: F841 -- DuckDB finds it by its name
                {
                    "line": pa.array(lines, pa.string()),
                    "value": pa.array(values, pa.string()),
                    "put": pa.array(times, pa.int64()),
                }
            )
            self.db.execute("INSERT INTO lines SELECT line, value, put FROM batch")
        meta = {"event_id": "id", "type": "type", "actor": "actor", "space_id": "space"}
        meta |= {"key": "key", "subject": "subject", "cause": "cause"}
        words = ", ".join(f"line->>'$.meta.{name}'" for name in meta)
        self.db.execute(
            f"INSERT INTO r (topic, part, off, ts, {', '.join(meta.values())}, ttl, value, put) "
            f"SELECT ?, ?, (line->>'$.offset')::BIGINT, (line->>'$.meta.ts')::TIMESTAMP, {words}, "
            "(line->>'$.meta.ttl_sec')::DOUBLE, value, put FROM lines",
            [topic, part],
        )

    def rows(self, sql: str) -> Rows:
        return sorted(self.db.sql(sql).fetchall(), key=repr)

    def events(self) -> Rows:
        return self.rows("SELECT topic, part, off, value, epoch_us(ts), put FROM r")

    def clean(self) -> set[tuple[str, int, int]]:
        """What passes: not expired, fit for its schema, and not said before in its partition."""
        passed: set[tuple[str, int, int]] = set()
        seen: dict[tuple[str, int, str], list[int]] = {}
        for topic, part, off, id_, ts, ttl, at, value in self.db.sql(
            "SELECT topic, part, off, id, epoch_us(ts), ttl, put, value FROM r "
            "ORDER BY topic, part, off"
        ).fetchall():
            if ttl is not None and ts + ttl * 1e6 <= at:
                continue
            wrong = ('"id":"no number"', f'"id":{1 << 64}')
            if topic == "flight.departed" and any(one in (value or "") for one in wrong):
                continue
            before = seen.setdefault((topic, part, id_), [])
            if any(abs(ts - one) <= 24 * 3600 * 1_000_000 for one in before):
                continue
            before.append(ts)
            passed.add((topic, part, off))
        return passed

    def _keep_passed(self) -> None:
        """The table ``p``: the records that ``clean`` passes."""
        import pyarrow as pa

        topics, parts, offsets = zip(*sorted(self.clean()), strict=True)
        batch = pa.table(  # noqa: F841 -- DuckDB finds it by its name
            {"topic": topics, "part": parts, "off": offsets}
        )
        self.db.execute("CREATE TABLE p AS SELECT r.* FROM r JOIN batch USING (topic, part, off)")

    def traffic(self) -> Rows:
        return self.rows(
            "SELECT epoch_us(date_trunc('hour', ts)), topic, type, count(*), "
            "coalesce(sum(strlen(value)), 0)::BIGINT, count(DISTINCT key), count(DISTINCT actor) "
            "FROM r GROUP BY ALL"
        )

    def compaction(self) -> Rows:
        return self.rows(
            "WITH g AS (SELECT topic, part, key, coalesce(max(off) FILTER (value IS NULL), 0) gone "
            "FROM r WHERE key IS NOT NULL GROUP BY ALL) "
            "SELECT topic, part, key, arg_max(value, off), max(off), count(*) "
            "FROM r JOIN g USING (topic, part, key) WHERE off > gone GROUP BY ALL"
        )

    def consolidation(self, pause_s: float = 900.0) -> Rows:
        return self.rows(
            "WITH o AS (SELECT *, coalesce(space, '') sp, lag(ts) OVER w prev FROM p "
            f"WHERE actor IS NOT NULL WINDOW w AS (PARTITION BY coalesce(space, ''), actor ORDER "
            f"BY {ORDER})), n AS (SELECT *, sum(CASE WHEN epoch(ts) - epoch(prev) > {pause_s} THEN "
            f"1 ELSE 0 END) OVER (PARTITION BY sp, actor ORDER BY {ORDER}) num FROM o) "
            "SELECT sp, actor, epoch_us(min(ts)), epoch_us(max(ts)), count(*), "
            "arg_min(id, (ts, topic, part, off)), arg_max(id, (ts, topic, part, off)), "
            "num = max(num) OVER (PARTITION BY sp, actor) FROM n GROUP BY sp, actor, num"
        )

    def sequences(self) -> Rows:
        return self.rows(
            f"WITH o AS (SELECT actor, type, coalesce(lag(type) OVER (PARTITION BY actor ORDER BY "
            f"{ORDER}), '(start)') before FROM p WHERE actor IS NOT NULL AND type IS NOT NULL) "
            "SELECT actor, before, type, count(*) FROM o GROUP BY ALL"
        )

    def temporal(self) -> Rows:
        return self.rows(
            "WITH o AS (SELECT topic, key, ts, row_number() OVER (PARTITION BY topic, key ORDER BY "
            "ts DESC) n, epoch_us(ts) - epoch_us(lag(ts) OVER (PARTITION BY topic, key ORDER BY "
            "ts)) gap FROM p WHERE key IS NOT NULL), s AS (SELECT topic, key, "
            "list_sort(list(gap) FILTER (n < 1000 AND gap IS NOT NULL)) gaps, count(*) c, "
            "epoch_us(min(ts)) a, epoch_us(max(ts)) b FROM o GROUP BY ALL) "
            "SELECT topic, key, c, a, b, gaps[ceil(len(gaps) * 0.5)::INT] FROM s"
        )

    def decisions(self, within_s: float = 3600.0) -> Rows:
        """Each decision once; its first outcome that is not older than it."""
        return self.rows(
            "WITH d AS (SELECT id AS ref, min((ts, topic, part, off)) p, "
            "arg_min(value, (ts, topic, part, off)) v, min(ts) ts FROM p "
            "WHERE type = 'ACTION_DECISION' GROUP BY id), "
            "o AS (SELECT value->>'$.decision' AS ref, ts, topic, part, off, value FROM p "
            "WHERE type = 'ACTION_EXECUTED'), "
            "f AS (SELECT d.ref, min(o.ts) ots, "
            "arg_min(o.value, (o.ts, o.topic, o.part, o.off)) ov "
            "FROM d JOIN o ON o.ref = d.ref AND o.ts >= d.ts GROUP BY d.ref) "
            "SELECT d.ref, d.v->>'$.action', d.v->>'$.context', epoch_us(d.ts), "
            f"coalesce(epoch_us(f.ots) - epoch_us(d.ts) > {within_s} * 1e6, false), "
            f"CASE WHEN epoch_us(f.ots) - epoch_us(d.ts) <= {within_s} * 1e6 "
            "THEN (f.ov->>'$.ok')::BOOLEAN END FROM d LEFT JOIN f USING (ref)"
        )

    def claims(self) -> Rows:
        return self.rows(
            "WITH o AS (SELECT *, lead(topic) OVER w nt, lead(actor) OVER w na "
            "FROM r WHERE topic IN ('coord.claim', 'coord.release') "
            f"WINDOW w AS (PARTITION BY subject ORDER BY {ORDER})) "
            "SELECT actor, subject, count(*), "
            "count(*) FILTER (nt = 'coord.claim' AND na <> actor), "
            "epoch_us(max(ts) FILTER (nt IS NULL)) FROM o WHERE topic = 'coord.claim' GROUP BY ALL"
        )
