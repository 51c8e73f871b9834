"""A real standalone cluster on this machine: a master and workers from the pip package alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from trunkline.check import load_extra
from trunkline.errors import InvalidOption, StorageError, TrunklineError
from trunkline.spark.session.start import prepare_environment, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = re.compile(r"local(\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\])?")
_STANDALONE = re.compile(r"spark://([^:/,\s]+:\d+)(,[^:/,\s]+:\d+)*")


@dataclass
class Cluster:
    """``with Cluster(...) as cluster:`` then ``session(master=cluster.url)``."""

    folder: str
    workers: int = 2
    cores: int = 1
    memory: str = "1g"
    port: int = 17077
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self.port + 1003}"

    def start(self, timeout_s: float = 90.0) -> None:
        """Returns when every worker has joined."""
        master = "org.apache.spark.deploy.master.Master"
        page = str(self.port + 1003)
        self._run(
            "master",
            [master, "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", page],
        )
        self._wait(0, timeout_s)
        worker = "org.apache.spark.deploy.worker.Worker"
        for number in range(self.workers):
            place = os.path.join(self.folder, f"worker-{number}")
            self._run(
                f"worker-{number}",
                [
                    worker,
                    "--host",
                    "127.0.0.1",
                    "--cores",
                    str(self.cores),
                    "--memory",
                    self.memory,
                    "--webui-port",
                    str(self.port + 1004 + number),
                    "--work-dir",
                    place,
                    self.url,
                ],
            )
        self._wait(self.workers, timeout_s)

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, name: str, words: list[str]) -> None:
        home = os.path.dirname(load_extra("pyspark", "spark").__file__)
        prepare_environment()
        os.makedirs(self.folder, exist_ok=True)
        # A port that is taken is an error: nobody would look for the cluster at the next one.
        environment = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_DAEMON_MEMORY": "384m",
            "SPARK_DAEMON_JAVA_OPTS": "-Dspark.port.maxRetries=0",
        }
        try:
            with open(os.path.join(self.folder, f"{name}.log"), "ab") as log:
                process = subprocess.Popen(
                    [os.path.join(home, "bin", "spark-class"), *words],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
        except OSError as error:
            raise StorageError(f"cannot start {name}: {error}") from error
        self.processes.append(process)

    def _wait(self, workers: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in self.processes:
                if process.poll() is not None:
                    raise TrunklineError(
                        f"a part of the cluster ended with status {process.returncode}",
                        hint=f"see the logs in {self.folder}; is port {self.port} taken?",
                    )
            if self._alive() >= workers:
                return
            time.sleep(0.25)
        raise TrunklineError(
            f"the cluster did not come up in {timeout_s:.0f} s",
            hint=f"see the logs in {self.folder}",
        )

    def _alive(self) -> int:
        try:
            with urlopen(f"{self.page}/json/", timeout=5) as answer:
                state = msgspec.json.decode(answer.read())
        except (URLError, OSError, msgspec.DecodeError):
            return -1
        if state.get("url") != self.url:
            return -1
        return sum(one.get("state") == "ALIVE" for one in state.get("workers", []))


def open_session(
    master: str, app: str = "trunkline", config: dict[str, str] | None = None
) -> SparkSession:
    """A session on a Spark of this machine (``local[*]``) or on a cluster. What is wrong with the
    address is said at once; Spark itself would try for minutes. Settings in ``config`` come last.
    """
    if _LOCAL.fullmatch(master):
        return session(app, master=master, config=config)
    if _STANDALONE.fullmatch(master):
        _check_answers(master)
    elif not master.startswith(("k8s://", "yarn")):
        raise InvalidOption(f"{master!r} is no Spark", hint="local[*], local[2], spark://host:port")
    return session(app, master=master, config=cluster_settings(master) | (config or {}))


def _check_answers(master: str) -> None:
    problem: OSError | None = None
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=5):
                return
        except (OSError, OverflowError) as error:
            problem = error if isinstance(error, OSError) else OSError(str(error))
    raise TrunklineError(
        f"no Spark answers at {master}: {problem and (problem.strerror or problem)}",
        hint="'trunkline spark cluster up' starts one",
    )


def cluster_settings(master: str = "") -> dict[str, str]:
    """What a session on a cluster needs besides its address: executors that call back, that find
    this package, and run it with this Python. Executors on other machines find the driver by its
    own address, not by loopback.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    for _ in range(3):
        here = os.path.dirname(here)
    hosts = re.findall(r"([^:/,\s]+):\d+", master.removeprefix("spark://"))
    near = bool(hosts) and all(host in ("127.0.0.1", "localhost") for host in hosts)
    address = "127.0.0.1" if near else _own_address(hosts[0] if hosts else "")
    return {
        "spark.executorEnv.PYTHONPATH": here,
        "spark.executor.memory": "1g",
        "spark.pyspark.python": sys.executable,
        "spark.sql.shuffle.partitions": "8",
        "spark.driver.host": address,
        "spark.driver.bindAddress": "127.0.0.1" if near else "0.0.0.0",
    }


def _own_address(towards: str) -> str:
    """The address under which others reach this machine: that of the way to ``towards``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards or "192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
