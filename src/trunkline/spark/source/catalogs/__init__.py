"""Where a log is: one catalog for each kind of URL.

A catalog knows the topics, where each partition begins and ends, and the offset of a time. The log
of a folder is read by its files (``scan``). Any other log is a ``RemoteLog``, which also gives the
records of a range of offsets, so that each task reads its own. To add a kind of log, write a
``RemoteLog`` in a module of its own and name it in ``_REMOTE``.
"""

from __future__ import annotations

from typing import Final

from trunkline.check import load_extra
from trunkline.spark.source.catalogs.folder import FolderCatalog
from trunkline.spark.source.catalogs.remote import RemoteLog

__all__ = [
    "Catalog",
    "FolderCatalog",
    "RemoteLog",
    "address_of",
    "is_remote",
    "open_catalog",
    "open_remote",
]

Catalog = FolderCatalog | RemoteLog
# The module and the class of each scheme, and the extra that its client is in.
_REMOTE: Final = {
    "http": ("broker", "BrokerLog", "spark"),
    "https": ("broker", "BrokerLog", "spark"),
    "nats": ("nats", "NatsLog", "nats"),
    "nats+tls": ("nats", "NatsLog", "nats"),
    "mongodb": ("mongo", "MongoLog", "mongo"),
    "mongodb+srv": ("mongo", "MongoLog", "mongo"),
}
_BROKER: Final = {"ws": "http", "wss": "https"}


def is_remote(root: str) -> bool:
    """Whether a log is reached by its address, not by its files."""
    return root.partition("://")[0] in _REMOTE and "://" in root


def address_of(url: str) -> str:
    """The address of a log as the source has it: a broker is read by HTTP."""
    scheme, mark, rest = url.partition("://")
    return f"{_BROKER[scheme]}{mark}{rest}" if mark and scheme in _BROKER else url


def open_remote(root: str, token: str) -> RemoteLog:
    name, kind, extra = _REMOTE[root.partition("://")[0]]
    module = load_extra(f"{__name__}.{name}", extra)
    found: RemoteLog = getattr(module, kind)(root, token)
    return found


def open_catalog(root: str, token: str = "") -> Catalog:
    return open_remote(root, token) if is_remote(root) else FolderCatalog(root)
