"""A bus whose folder was removed, replaced or made read-only: health says so, nothing is acked."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.bus.connect import open_local
from trunkline.errors import StorageError
from trunkline.options import BrokerOptions


def _told(_kind: Any, error: Any, _trace: Any) -> bool:
    """Whoever ends a broker without a folder may be told of it."""
    return "is gone" in str(error)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replace(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    trunkline.connect(f"file:{folder}")


GONE = [(_remove, "is gone"), (_move, "is gone"), (_replace, "another bus has taken the place")]


@pytest.mark.parametrize(("change", "said"), GONE)
async def test_readiness_and_health_notice_that_the_folder_is_gone(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "bus"
    options = BrokerOptions(url=f"file:{folder}", port=0, metrics_s=0)
    async with contextlib.AsyncExitStack() as stack:
        stack.push(_told)
        broker = await stack.enter_async_context(Broker(options))
        base = broker.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
            await http.post("/topics/t/events", json={"payload": 1})
            assert (await http.get("/readyz")).status_code == 200
            change(folder)
            ready = await http.get("/readyz")
            assert ready.status_code == 503
            assert said in ready.json()["health"]["problem"]
            assert (await http.get("/healthz")).status_code == 200, "the process is alive"
        assert said in (await broker.hub.bus.health())["problem"]


async def test_a_publish_into_a_removed_folder_says_that_the_folder_is_gone(tmp_path: Path) -> None:
    bus = open_local(f"file:{tmp_path / 'bus'}")
    await bus.publish("t", 1)
    shutil.rmtree(tmp_path / "bus")
    with pytest.raises(StorageError, match="is gone") as caught:
        await bus.publish("new", 1)
    assert caught.value.hint
    with pytest.raises(StorageError, match="is gone"):
        await bus.close()


@pytest.mark.parametrize("how", ["mount", "mode"])
async def test_a_read_only_folder_is_no_healthy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with trunkline.connect(f"file:{tmp_path / 'bus'}") as bus:
        await bus.publish("t", 1)
        assert (await bus.health())["ok"]
        with monkeypatch.context() as patched:  # root may write into any mode, and mounts need root
            if how == "mount":
                real = os.statvfs(tmp_path)

                class Mounted:
                    f_flag = real.f_flag | os.ST_RDONLY
                    f_bavail, f_frsize = real.f_bavail, real.f_frsize

                patched.setattr(os, "statvfs", lambda _path: Mounted())
            else:
                patched.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
            health = await bus.health()
        assert (health["ok"], "is read-only" in health["problem"]) == (False, True)
        assert (await bus.health())["ok"], "it can be written again"
