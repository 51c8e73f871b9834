"""The log of a bus in MongoDB: batches of records, by the offset that each begins with.

Each task reads its own range from the primary's majority, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import ConfigurationError, InvalidURI, PyMongoError
from pymongo.read_concern import ReadConcern

from trunkline.errors import InvalidOption, NoBus
from trunkline.log.head import Head
from trunkline.spark.source.catalogs.remote import RemoteLog
from trunkline.spark.source.parse import Row, decode_rows
from trunkline.store.mongo import names
from trunkline.store.mongo.names import LogPlace
from trunkline.store.mongo.rows import from_body, micros
from trunkline.store.mongo.server import typed

_SELECT_MS: Final = 5000
_ROWS: Final = 5000  # of a page, about
_FIELDS: Final = {"at": 1, "records.offset": 1, "records.body": 1}


class MongoLog(RemoteLog):
    def __init__(self, root: str, token: str) -> None:
        super().__init__(root, token)
        try:
            self._client: MongoClient[dict[str, Any]] = MongoClient(
                root, tz_aware=True, serverSelectionTimeoutMS=_SELECT_MS, appname="trunkline spark"
            )
            other = os.environ.get("MONGO_DB") or "trunkline"
            db = self._client.get_default_database(other)
        except (InvalidURI, ConfigurationError, ValueError, PyMongoError) as error:
            raise InvalidOption(f"not a MongoDB URL: {error}", name="url") from None
        self._db = db
        self._log = db.get_collection(names.LOG, read_concern=ReadConcern("majority"))
        self._incarnations: dict[str, str] = {}

    def topics(self) -> dict[str, int]:
        with typed():
            found = list(self._db[names.CONFIGS].find({}, {"partitions": 1}).sort("_id", 1))
            if not found and names.ABOUT not in self._db.list_collection_names():
                raise NoBus(
                    f"there is no bus in database {self._db.name}",
                    hint="the first event that is published makes one",
                )
        return {one["_id"]: int(one.get("partitions", 1)) for one in found}

    def head(self, topic: str, partition: int) -> Head:
        place = self._place(topic, partition)
        with typed():
            counter = self._db[names.COUNTERS].find_one(
                {"_id": place.counter, "incarnation": place.incarnation}, {"first": 1}
            )
            last = self._log.find_one(
                {"_id": place.since()}, {"first": 1, "n": 1}, sort=[("_id", -1)]
            )
        first = 1 if counter is None else int(counter.get("first", 1))
        return Head(start=first, next=1 if last is None else int(last["first"] + last["n"]))

    def seek(self, topic: str, partition: int, when: datetime) -> int:
        place, head = self._place(topic, partition), self.head(topic, partition)
        span = {"_id": place.since(), "newest": {"$gte": micros(when)}}
        with typed():
            for batch in self._log.find(span, _FIELDS).sort("_id", 1):
                for row in batch["records"]:
                    if row["offset"] >= head.start and from_body(row["body"]).ts >= when:
                        return int(row["offset"])
        return head.next

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[Row]]:
        place = self._place(topic, partition)
        with typed():
            base = self._log.find_one({"_id": place.until(start)}, {"first": 1}, sort=[("_id", -1)])
            low = start if base is None else int(base["first"])
            span = {"_id": {"$gte": place.batch(low), "$lt": place.batch(end)}}
            lines: list[str] = []
            for batch in self._log.find(span, _FIELDS, batch_size=100).sort("_id", 1):
                at = f',"commit":{{"at":{round(batch["at"] * 1_000_000)}}}}}'
                lines += [
                    f'{{"offset":{row["offset"]},"meta":{row["body"]}{at}'
                    for row in batch["records"]
                    if start <= row["offset"] < end
                ]
                if len(lines) >= _ROWS:
                    yield decode_rows("\n".join(lines).encode())
                    lines = []
        if lines:
            yield decode_rows("\n".join(lines).encode())

    def _place(self, topic: str, partition: int) -> LogPlace:
        if topic not in self._incarnations:
            with typed():
                found = self._db[names.CONFIGS].find_one({"_id": topic}, {"incarnation": 1})
            self._incarnations[topic] = "" if found is None else found["incarnation"]
        return LogPlace(topic, partition, self._incarnations[topic])

    def close(self) -> None:
        self._client.close()
