"""Work that takes long: a client starts a job, looks at its progress and cancels it by its id."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from trunkline.clock import Clock
from trunkline.errors import Conflict, NotFound, TrunklineError

logger = logging.getLogger(__name__)

_KEPT = 100  # jobs that have ended
_RUNNING_MAX = 50
_RESULTS_MAX = 10_000


class JobState(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Job:
    """``work`` counts with ``step`` and keeps what it found with ``keep``."""

    def __init__(self, kind: str, topic: str, agent: str, clock: Clock) -> None:
        self.id = secrets.token_hex(8)
        self.kind = kind
        self.topic = topic
        self.agent = agent
        self.state = JobState.RUNNING
        self.done = 0
        self.refused = 0
        self.total: int | None = None
        self.failure: TrunklineError | None = None
        self.results: list[Any] = []
        self.ended = asyncio.Event()
        self._clock = clock
        self.started = clock.now()
        self._began = clock.monotonic()
        self._took_s: float | None = None
        self.task: asyncio.Task[None] | None = None

    def step(self, count: int = 1, refused: int = 0) -> None:
        self.done += count
        self.refused += refused

    def keep(self, result: Any) -> None:
        """Part of the answer; a very long one is cut."""
        if len(self.results) < _RESULTS_MAX:
            self.results.append(result)

    def end(self, state: JobState, failure: TrunklineError | None = None) -> None:
        self.state, self.failure = state, failure
        self._took_s = self._clock.monotonic() - self._began
        self.ended.set()

    def show(self) -> dict[str, Any]:
        seconds = (
            self._took_s if self._took_s is not None else self._clock.monotonic() - self._began
        )
        return {
            "id": self.id,
            "kind": self.kind,
            "topic": self.topic,
            "agent": self.agent,
            "state": self.state.value,
            "done": self.done,
            "refused": self.refused,
            "total": self.total,
            "rate": round(self.done / seconds, 1) if seconds > 0 else None,
            "started": self.started,
            "seconds": round(seconds, 3),
            "error": None if self.failure is None else str(self.failure),
            "results": self.results,
        }


class Jobs:
    """The jobs of a broker: those that run, and the last that ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[str, Job] = {}

    def start(
        self, kind: str, topic: str, agent: str, work: Callable[[Job], Awaitable[None]]
    ) -> Job:
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        if len(running) >= _RUNNING_MAX:
            raise Conflict("too many jobs are running", code="too_many")
        if any((job.kind, job.topic) == (kind, topic) for job in running):
            raise Conflict(
                f"{kind} of {topic} is running already",
                code="running",
                hint="see GET /jobs, or cancel it with DELETE /jobs/{id}",
            )
        job = Job(kind, topic, agent, self._clock)
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, work))
        for old in [one for one in self._jobs.values() if one.state is not JobState.RUNNING][
            :-_KEPT
        ]:
            del self._jobs[old.id]
        return job

    async def _run(self, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await work(job)
        except asyncio.CancelledError:
            job.end(JobState.CANCELLED)
        except TrunklineError as error:
            job.end(JobState.FAILED, error)
        except Exception:
            logger.exception("%s of %s failed", job.kind, job.topic)
            job.end(JobState.FAILED, TrunklineError("internal error", code="internal"))
        else:
            job.end(JobState.DONE)

    def get(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"there is no job {name[:40]}")
        return job

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    async def cancel(self, job: Job) -> None:
        """End it where it is; what it has done stays done."""
        if job.task is not None:
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)

    async def close(self) -> None:
        for job in self.all():
            await self.cancel(job)
