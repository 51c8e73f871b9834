"""Plant a mistake in the project's code: a test that finds none of these proves nothing."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest


class Mutant(NamedTuple):
    """One piece of a method reads otherwise."""

    owner: type
    method: str
    old: str
    new: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = textwrap.dedent(inspect.getsource(getattr(self.owner, self.method)))
        assert source.count(self.old) == 1, "the mutant must change one place"
        made: dict[str, Any] = {}
        source = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        scope = dict(vars(sys.modules[self.owner.__module__]))
        exec(compile(source, "<mutant>", "exec", dont_inherit=True), scope, made)
        monkeypatch.setattr(self.owner, self.method, made[self.method])
