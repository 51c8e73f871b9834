"""JSONPath queries (RFC 9535) with bounds, on the library ``jsonpath-rfc9535``.

A query and a payload may both come from somebody else. So a query has a budget of nodes that it may
visit for one event, and its functions ``match`` and ``search`` share a time limit for one event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, cast

import regex
from iregexp_check import check
from jsonpath_rfc9535 import JSONPathEnvironment, JSONPathError
from jsonpath_rfc9535.function_extensions import ExpressionType, FilterFunction
from jsonpath_rfc9535.function_extensions._pattern import map_re
from jsonpath_rfc9535.node import JSONPathNode
from jsonpath_rfc9535.parse import Parser
from jsonpath_rfc9535.segments import (
    JSONPathChildSegment,
    JSONPathRecursiveDescentSegment,
    JSONPathSegment,
)
from jsonpath_rfc9535.tokens import TokenStream

from trunkline.errors import InvalidFilter

NODES_MAX: Final = 200_000  # nodes that one query may visit for one event

Search = Callable[[Any, str, float], bool]
"""Whether a compiled expression is found in a text, within so many seconds."""


class _Environment(JSONPathEnvironment):
    """The library's environment, with a budget of nodes and bounded regular expressions."""

    def __init__(self, search: Search, match_s: float) -> None:
        self._match_s = match_s
        self._search = search
        self.begin()
        self.parser_class = _Parser
        super().__init__()

    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _Match(self, whole=True)
        self.function_extensions["search"] = _Match(self, whole=False)

    def begin(self) -> None:
        """Give the next event its budgets."""
        self._nodes = NODES_MAX
        self._left_s = self._match_s

    def search(self, expression: Any, text: str) -> bool:
        began = perf_counter()
        found = self._search(expression, text, max(self._left_s, 0.001))
        self._left_s -= perf_counter() - began
        return found

    def visit(self, node: JSONPathNode) -> None:
        value = node.value
        self._nodes -= 1 + (len(value) if isinstance(value, dict | list) else 0)
        if self._nodes < 0:
            raise InvalidFilter(
                f"this JSONPath visits more than {NODES_MAX} nodes of one event",
                hint="name the path instead of searching with ..",
            )


class _Match(FilterFunction):
    arg_types: Final = [ExpressionType.VALUE, ExpressionType.VALUE]
    return_type = ExpressionType.LOGICAL

    def __init__(self, env: _Environment, *, whole: bool) -> None:
        self._env = env
        self._whole = whole

    def __call__(self, text: object, pattern: object) -> bool:
        if not isinstance(text, str) or not isinstance(pattern, str):
            return False
        expression = _compiled(pattern, self._whole)
        return expression is not None and self._env.search(expression, text)


@lru_cache(maxsize=256)
def _compiled(pattern: str, whole: bool) -> Any:
    """The expression, or None where ``pattern`` is no I-Regexp (RFC 9485)."""
    if not check(pattern):
        return None
    source = map_re(pattern)
    try:
        return regex.compile(rf"\A(?:{source})\Z" if whole else source, regex.VERSION1)
    except regex.error:
        return None


class _Child(JSONPathChildSegment):
    def resolve(self, nodes: Iterable[JSONPathNode]) -> Iterable[JSONPathNode]:
        return super().resolve(_visited(cast(_Environment, self.env), nodes))


class _Descent(JSONPathRecursiveDescentSegment):
    def _visit(self, node: JSONPathNode, depth: int = 1) -> Iterable[JSONPathNode]:
        cast(_Environment, self.env).visit(node)
        return super()._visit(node, depth)


def _visited(env: _Environment, nodes: Iterable[JSONPathNode]) -> Iterable[JSONPathNode]:
    for node in nodes:
        env.visit(node)
        yield node


class _Parser(Parser):
    def parse_query(
        self, stream: TokenStream, *, in_filter: bool = False
    ) -> Iterable[JSONPathSegment]:
        for segment in super().parse_query(stream, in_filter=in_filter):
            kind = _Descent if isinstance(segment, JSONPathRecursiveDescentSegment) else _Child
            yield kind(env=segment.env, token=segment.token, selectors=segment.selectors)


def compile_query(expression: str, search: Search, match_s: float) -> Callable[[Any], bool]:
    """A function that says whether the query finds a node in a payload."""
    env = _Environment(search, match_s)
    try:
        query = env.compile(expression)
    except JSONPathError as error:
        position = error.token.index if error.token else 0
        raise InvalidFilter(f"not a JSONPath: {error}", position=position) from error

    def found(payload: Any) -> bool:
        env.begin()
        try:
            return query.find_one(payload) is not None
        except JSONPathError:
            return False

    return found
