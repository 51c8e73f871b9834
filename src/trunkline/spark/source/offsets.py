"""The offsets that a reader's options mean in a given log: where each partition starts and ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from trunkline.errors import InvalidOption, NotFound
from trunkline.names import is_dead, is_pattern, matches
from trunkline.spark.lake.tiering import lake_first, lake_seek
from trunkline.spark.source.catalogs import open_catalog
from trunkline.spark.source.options import (
    EARLIEST,
    LATEST,
    Edge,
    Selection,
    When,
    read_options,
)
from trunkline.spark.source.scan import OffsetRange, lost

if TYPE_CHECKING:
    from trunkline.spark.lake.table import LakeFile
    from trunkline.spark.source.catalogs import Catalog

Place = dict[str, dict[str, int]]  # topic -> partition -> offset, as a checkpoint keeps it


def catalog_of(choice: Selection) -> Catalog:
    """The catalog of the log that a query reads."""
    return open_catalog(choice.root, choice.token)


def topics_of(options: Mapping[str, str]) -> list[str]:
    """Every topic of a bus or broker, by name."""
    catalog = catalog_of(read_options({**options, "subscribePattern": ".*"}, stream=False))
    try:
        return list(catalog.topics())
    finally:
        catalog.close()


def check_source(options: Mapping[str, str]) -> None:
    """Raise what is wrong with what a batch would read, before Spark is started for it."""
    choice = read_options(options, stream=False)
    catalog = catalog_of(choice)
    try:
        resolve(catalog, choice, "starting")
    finally:
        catalog.close()


def chosen_partitions(catalog: Catalog, choice: Selection) -> list[tuple[str, int]]:
    """The partitions to read, in order; ``NotFound`` if a named topic is not there."""
    topics = catalog.topics()
    if choice.assign:
        for topic, partitions in choice.assign.items():
            count = catalog.partitions(topic)
            if any(not 0 <= partition < count for partition in partitions):
                raise NotFound(f"{topic} has partitions 0 to {count - 1}", topic=topic)
        return sorted((t, p) for t, parts in choice.assign.items() for p in set(parts))
    if choice.pattern:
        try:
            shape = re.compile(choice.pattern)
        except re.error as error:
            raise InvalidOption(f"subscribePattern: {error}", hint="a regular expression") from None
        names = [name for name in topics if shape.fullmatch(name)]
    else:
        names = []
        for name in choice.topics:
            if is_pattern(name):
                names += [
                    topic
                    for topic in topics
                    if matches(name, topic) and (not is_dead(topic) or is_dead(name))
                ]
            else:
                if name not in topics:
                    catalog.partitions(name)  # says so
                names.append(name)
    return sorted((name, number) for name in set(names) for number in range(topics[name]))


def resolve(
    catalog: Catalog, choice: Selection, edge: Edge, files: Sequence[LakeFile] = ()
) -> Place:
    """The offset each partition starts at, or the one it ends before. ``files`` are the lake's."""
    wanted = choice.starting if edge == "starting" else choice.ending
    place: Place = {}
    for topic, partition in chosen_partitions(catalog, choice):
        at = wanted
        if isinstance(wanted, dict):
            at = wanted.get(topic, {}).get(partition)
            if at is None:
                raise InvalidOption(
                    f"{edge}Offsets does not say where {topic}/{partition} is to {edge[:-3]}",
                    hint="name every partition, -1 for the latest",
                )
        offset = _offset(catalog, choice, (topic, partition), at, edge, files)
        place.setdefault(topic, {})[str(partition)] = offset
    return place


def _offset(
    catalog: Catalog,
    choice: Selection,
    where: tuple[str, int],
    at: Any,
    edge: Edge,
    files: Sequence[LakeFile],
) -> int:
    reader = catalog.reader(*where)
    head = reader.head()
    if at in ("earliest", EARLIEST):
        return min(head.start, lake_first(files, *where) or head.start)
    if at in ("latest", LATEST):
        return head.next
    if isinstance(at, When):
        found = lake_seek(files, *where, at.at, head.start) or reader.seek(at.at)
        if found == head.next and edge == "starting" and choice.unmatched == "error":
            raise NotFound(
                f"{where[0]}/{where[1]} has no record at or after {at.at.isoformat()}",
                hint="startingOffsetsByTimestampStrategy=latest starts at the end instead",
            )
        return found
    offset = cast(int, at)
    if head.start <= offset <= head.next:
        return offset
    if choice.lake and offset < head.start:
        return offset
    if choice.fail_on_data_loss:
        raise lost(*where, offset, head)
    return min(max(offset, head.start), head.next)


def spans_between(start: Place, end: Place) -> list[OffsetRange]:
    """The spans of every partition that has something between two places."""
    return [
        OffsetRange(topic, int(partition), start[topic][partition], offset)
        for topic, partitions in end.items()
        for partition, offset in partitions.items()
        if offset > start[topic][partition]
    ]
