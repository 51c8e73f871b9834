"""``df.write`` and ``df.writeStream`` with ``format("trunkline")``, to a folder or a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from trunkline.errors import InvalidOption
from trunkline.spark.sink import folder, remote
from trunkline.spark.sink.folder import FolderSink, Staged
from trunkline.spark.sink.remote import RemoteSink, StagedRows
from trunkline.spark.sink.rows import read_sink_options
from trunkline.spark.source.catalogs import is_remote
from trunkline.spark.source.options import bus_of, token_of


class _Writer:
    """What is the same for a batch and for a stream."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        root, chosen = bus_of(options), read_sink_options(options)
        self._sink: Any = (
            RemoteSink(root, token_of(options), chosen, schema, overwrite)
            if is_remote(root)
            else FolderSink(root, chosen, schema, overwrite)
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        message: WriterCommitMessage = self._sink.stage(iterator)
        return message

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int = 0,  # noqa: ARG002, N803
    ) -> None:
        self._sink.discard(_staged(messages))


class BatchSink(_Writer, DataSourceArrowWriter):
    """``df.write.format("trunkline")``; with txnAppId and txnVersion, once for each version."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        options = self._sink.options
        version = options.version if options.app else 0
        self._sink.settle(_staged(messages), options.app, version)


class StreamSink(_Writer, DataSourceStreamArrowWriter):
    """``df.writeStream.format("trunkline")``: exactly once per query and batch."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        staged = _staged(messages)
        app = self._sink.options.app or next((one.query for one in staged if one.query), "")
        if staged and not app:
            raise InvalidOption("the query has no id", hint="set option txnAppId")
        if staged:
            self._sink.settle(staged, app, batchId)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged | StagedRows]:
    return [one for one in messages if isinstance(one, Staged | StagedRows)]


def sent_version(options: Mapping[str, str], app: str) -> int:
    """The last version of ``app`` that is in the log as a whole; -1 if there is none."""
    root = bus_of(options)
    if is_remote(root):
        return remote.sent_version(root, token_of(options), app)
    return folder.sent_version(root, app)
