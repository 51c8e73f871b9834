"""A Spark session made for a log on this machine: quiet, on loopback alone, quick to start.

Every setting can be given again as an argument, and yours counts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trunkline.check import load_extra
from trunkline.errors import TrunklineError
from trunkline.spark.session.errors import install_hook
from trunkline.spark.session.java import cache_dir, class_archive, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J = """\
status = off
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = ${sys:trunkline.spark.log:-/dev/null}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
# Arrow else checks the bounds of every value that Spark takes out of a batch.
_ARROW = "-Darrow.enable_unsafe_memory_access=true"
# Measured together: a scan costs the JVM less than with G1 and the usual thresholds. What runs per
# row passes these at once all the same; what plans a query is compiled later.
_THROUGHPUT = (
    "-XX:+UseParallelGC -XX:Tier4InvocationThreshold=50000 "
    "-XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
)
_STREAMING = "org.apache.spark.sql.execution.streaming"

TUNED: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.stateStore.providerClass": (
        f"{_STREAMING}.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.pollingDelay": "20ms",
    # Files are read by name: looking them up takes no job with a task for each of them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.executor.extraJavaOptions": f"{_ARROW} {_THROUGHPUT}",
}
LOOPBACK: dict[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(
    app: str = "trunkline",
    *,
    master: str = "local[*]",
    config: dict[str, str] | None = None,
    quick: bool = False,
) -> SparkSession:
    """A Spark session, or the one that is running. ``quick`` starts sooner and runs slower: it is
    for tests and short commands.
    """
    install_hook()
    load_extra("pyspark", "spark")
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    prepare_environment()
    _sweep_logs()
    log = os.path.join(cache_dir(), f"spark-{os.getpid()}.log")
    settings = TUNED | LOOPBACK | {"spark.sql.warehouse.dir": os.path.join(cache_dir(), "tables")}
    settings |= {"spark.driver.extraJavaOptions": _java_options(log, quick=quick)}
    builder: Any = SparkSession.builder.master(master).appName(app)
    for name, value in (settings | (config or {})).items():
        builder = builder.config(name, value)
    try:
        with _output_to(log):
            spark: SparkSession = builder.getOrCreate()
    except Exception as error:
        raise TrunklineError(
            f"Spark did not start: {_last_words(log) or error}", hint=f"the whole story: {log}"
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    _quieten()
    return spark


def _quieten() -> None:
    """An error in a query is raised: no need to print it as well, with every Java frame."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel("CRITICAL")


def prepare_environment() -> None:
    """What Spark reads from the environment: which Java, which Python, which address."""
    java = find_java()
    os.environ["JAVA_HOME"] = java.home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_CONF_DIR", _empty_conf())


def _empty_conf() -> str:
    """A folder for SPARK_CONF_DIR: on the class path a class archive allows no file."""
    place = os.path.join(cache_dir(), "conf")
    os.makedirs(place, exist_ok=True)
    return place


def _log_settings() -> str:
    path = os.path.join(cache_dir(), "log4j2.properties")
    if not os.path.exists(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(_LOG4J)
    return path


def _java_options(log: str, *, quick: bool) -> str:
    words = ["-Duser.timezone=UTC", _ARROW, f"-Dtrunkline.spark.log={log}"]
    words += [f"-Dlog4j2.configurationFile=file:{_log_settings()}", "-Xlog:disable"]
    words += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if quick else [_THROUGHPUT]
    import pyspark

    jars = os.path.join(os.path.dirname(pyspark.__file__), "jars")
    archive = class_archive(find_java(), jars)
    if os.path.exists(archive):
        words.append(f"-XX:SharedArchiveFile={archive}")
    elif _may_make(archive + ".making"):
        words.append(f"-XX:ArchiveClassesAtExit={archive}")
    return " ".join(words)


def _sweep_logs() -> None:
    """Remove the logs of sessions that ended days ago."""
    for name in os.listdir(cache_dir()):
        path = os.path.join(cache_dir(), name)
        with contextlib.suppress(OSError):
            if name.endswith(".log") and time.time_ns() / 1e9 - os.stat(path).st_mtime > 3 * 86_400:
                os.unlink(path)


def _may_make(marker: str) -> bool:
    """Whether nobody else has been making the archive within the last hour."""
    with contextlib.suppress(OSError):
        age = time.time_ns() / 1e9 - os.stat(marker).st_mtime
        if age < 3600:
            return False
    with open(marker, "w", encoding="utf-8"):
        return True


@contextlib.contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Send what the JVM says while it starts, and after, to a file; Python's own stays. The JVM
    outlives Python by some seconds: a reader of our output must not wait for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in kept:
        os.dup2(fd, number)
    os.close(fd)
    try:
        yield
    finally:
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)


def _last_words(log: str) -> str:
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError:
        return ""
    telling = [line for line in lines if "Exception" in line or "Error" in line]
    return (telling or lines or [""])[-1][:300]
