"""The text by which members of a group compare their filters is the same in each process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.errors import InvalidFilter
from trunkline.filters.named import filter_named, name_of

PROGRAM = """
import functools
from trunkline.filters import all_of, field, jsonpath, not_
from trunkline.filters.named import name_of
from trunkline.filters.where import compile_where

class Dearer:
    def __init__(self, than): self.than = than
    def __call__(self, event): return event.payload > self.than

def wanted(event): return True
def above(least, event): return event.payload > least

for one in (
    wanted,
    lambda event: event.type in {"a", "b", "c"},
    functools.partial(above, 3),
    Dearer(3),
    field("payload.a", {"b", "c", "d"}, "in"),
    field("payload.a", "x.*", "regex"),
    jsonpath("$.items[?@.sku == 'x1']"),
    all_of(compile_where("payload.a > 3"), not_(lambda event: True)),
):
    print(name_of(one))
"""


def names(path: Path, program: str) -> list[str]:
    path.write_text(program, "utf-8")
    run = [sys.executable, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_filter_has_the_same_name_in_each_process(tmp_path: Path) -> None:
    pytest.importorskip("sqlglot")
    first = names(tmp_path / "worker.py", PROGRAM)
    assert len(set(first)) == 8
    for _ in range(2):  # with another seed of the hashes, and other addresses
        assert names(tmp_path / "worker.py", PROGRAM) == first


def test_functions_of_two_programs_have_two_names(tmp_path: Path) -> None:
    program = "from trunkline.filters.named import name_of\ndef wanted(event): return True\n"
    program += "print(name_of(wanted))\n"
    one, other = names(tmp_path / "one.py", program), names(tmp_path / "other.py", program)
    assert (one, other) == (["py:__main__[one.py]:wanted"], ["py:__main__[other.py]:wanted"])


def test_a_lambda_with_another_body_is_another_filter() -> None:
    placed, cancelled = (name_of(lambda e: e.type == "p"), name_of(lambda e: e.type == "c"))
    assert placed != cancelled
    least = 3
    assert name_of(lambda e: e.payload > least) == name_of(lambda e: e.payload > least)


def test_a_function_of_a_module_is_found_by_its_name() -> None:
    text = name_of(names)  # type: ignore[arg-type]
    assert text == f"py:{__name__}:names"
    assert filter_named(text) is names  # type: ignore[comparison-overlap]


def test_a_filter_that_is_only_described_is_not_imported() -> None:
    with pytest.raises(InvalidFilter, match="does not have"):
        filter_named("py:jsonpath('$.a:b')")
