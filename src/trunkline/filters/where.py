"""``where``: a condition in SQL that means the same to a bus, to a command and to Spark.

Values from a payload or header take the type of what they are compared with, what cannot be read as
that type is NULL, and NULL is never wanted. Each construct is read into both of its meanings at
once, the Python and the Spark one, so that they are judged side by side.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, NoReturn

import msgspec

from trunkline.errors import InvalidFilter
from trunkline.event import Event, Record
from trunkline.explain import nearest
from trunkline.fields import FIELDS
from trunkline.filters import MISSING, Filter, bounded, made, need, read_time
from trunkline.filters.work import METER

DEPTH_MAX: Final = 16  # of nested brackets and operators
WORK_MAX: Final = 10_000_000  # units of work for one event; a unit takes about 10 ns
_CHARACTERS_A_UNIT: Final = 8  # of text that is scanned, folded or encoded once

Kind = Literal["any", "text", "number", "bool", "time", "null", "list", "map"]
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("name", "text", "word"), "text"),
    "time": "time",
    "seconds": "number",
    "texts": "list",
    "map": "map",
    "json": "any",
}
PLACE: Final = frozenset({"offset", "partition"})
COLUMNS: Final[dict[str, Kind]] = {
    **{field.name: _KINDS[field.kind] for field in FIELDS},
    **dict.fromkeys(PLACE, "number"),
}


class _Work:
    """What is left of the work that one evaluation may do. A condition that needs more is refused:
    it would hold up every other subscriber of the process.
    """

    __slots__ = ("left", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.left = WORK_MAX

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise InvalidFilter(
                "this condition needs too much work for one event",
                hint="use LIKE with fewer _, or on shorter text",
                text=self.text,
            )


class Where:
    """A condition in SQL. ``tree`` is what sqlglot parsed; ``columns`` are the names it reads.

    An evaluation has a budget of work (``WORK_MAX``); beyond it, it raises ``InvalidFilter``.
    """

    __slots__ = ("_on_record", "_run", "_work", "columns", "spark", "text", "tree")

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = _parse(text)
        reader = _Reader(text, self.tree)
        term = reader.condition(self.tree, 0)
        self.columns = frozenset(reader.columns)
        self.spark = term.sql
        self._on_record = reader.on_record
        self._run = term.run
        self._work = reader.work

    def matches(self, record: Record) -> bool:
        self._work.left = WORK_MAX
        try:
            return self._run(record if self._on_record else record.event) is True
        finally:
            METER.units += WORK_MAX - self._work.left

    def on_event(self) -> Filter:
        """The condition as a filter; ``InvalidFilter`` if it asks for a place in a log."""
        if self._on_record:
            names = " and ".join(sorted(self.columns & PLACE))
            raise InvalidFilter(f"an event has no {names} before it is in a log", text=self.text)
        run, work = self._run, self._work

        def wanted(event: Event) -> bool:
            work.left = WORK_MAX
            try:
                return run(event) is True
            finally:
                METER.units += WORK_MAX - work.left

        return made(wanted, "where", self.text)


def compile_where(text: str) -> Filter:
    """The condition ``text`` as a filter; see ``Where`` for one that reads offset or partition."""
    return Where(text).on_event()


def where_columns(text: str) -> frozenset[str]:
    """The columns a where reads: ``payload`` for any path into it."""
    return Where(text).columns


def to_spark(text: str) -> str:
    """The same condition for a Spark table of these columns, whose ``payload`` is JSON text."""
    return Where(text).spark


def _refuse(text: str, position: int, why: str, hint: str = "") -> NoReturn:
    near = text[position : position + 24]
    raise InvalidFilter(
        f"{why}, at character {position + 1}" + (f" near {near!r}" if near else ""),
        position=position,
        text=text,
        hint=hint,
    )


def _column_hint(text: str, name: str) -> str:
    """What was probably meant by a name that is no column."""
    if f'"{name}"' in text:
        return f"text stands in single quotes: '{name}'"
    if name in ("error", "reason", "attempts", "group"):
        return f'of a dead letter: headers."dlq-{name}"; a field of the payload: payload.{name}'
    guess = nearest(name, COLUMNS)
    if guess is not None:
        return f"did you mean {guess}? text stands in single quotes: '{name}'"
    return f"a field of the payload is payload.{name}; columns: {', '.join(COLUMNS)}"


_OPERANDS: Final = {"VAR", "IDENTIFIER", "STRING", "NUMBER", "TRUE", "FALSE", "NULL"}
_OPEN: Final = {"L_PAREN", "L_BRACKET", "L_BRACE"}
_CLOSE: Final = {"R_PAREN", "R_BRACKET", "R_BRACE"}


def _parse(text: str) -> Any:
    sqlglot = need("sqlglot")
    bounded(text, "a where")
    tokens: list[Any] = []
    try:
        tokens = sqlglot.tokenize(text)
        _check_depth(text, tokens)
        return sqlglot.parse_one(text, into=sqlglot.exp.Condition)
    except RecursionError:
        _refuse(text, 0, "nested too deep")
    except sqlglot.errors.ParseError as error:
        first = error.errors[0] if error.errors else {}
        at = (first.get("line"), first.get("col"))
        position = next((token.start for token in tokens if (token.line, token.col) == at), 0)
        said = str(first.get("description") or "there is no condition").partition(" for <class")[0]
        if said.startswith("Required keyword"):  # a word that nobody typed
            said = "a value is missing behind the operator"
        _refuse(text, position, said, "for example: payload.id = 7 and key like 'c%'")
    except sqlglot.errors.TokenError:
        _refuse(text, max(text.rfind("'"), text.rfind('"'), 0), "a quote is not closed")


def _check_depth(text: str, tokens: list[Any]) -> None:
    # The parser recurses once per bracket and prefix; compiled, it has no limit of its own.
    depth = run = 0
    for token in tokens:
        kind = token.token_type.name
        depth += (kind in _OPEN) - (kind in _CLOSE)
        run = 0 if kind in _OPERANDS or kind in _CLOSE else run + 1
        if depth > DEPTH_MAX or run > 2 * DEPTH_MAX:
            _refuse(text, token.start, f"nested deeper than {DEPTH_MAX}")


# How a stored value is read as a kind. Each returns None, which is NULL, for what it cannot read.

_NUMBER = re.compile(r"\s*(?:([+-]?\d+)|[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)\s*", re.A)
_BOOL: Final = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}
_encode = msgspec.json.Encoder().encode


def _number(value: Any) -> int | float | None:
    if type(value) is int or type(value) is float:
        return value
    if type(value) is str and len(value) <= 400 and (found := _NUMBER.fullmatch(value)):
        return int(found[1]) if found[1] else float(value)
    return None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _text(value: Any) -> str | None:
    if value is None or type(value) is str:
        return value
    text = _encode(value).decode()
    return text if text[0] != '"' else str(msgspec.json.decode(text))


def _bool(value: Any) -> bool | None:
    if value is None or type(value) is bool:
        return value
    return _BOOL.get(str(_text(value)).strip().lower())


Row = Any  # an Event, or a Record where the condition reads its place
Run = Callable[[Row], Any]

_READ: Final[dict[Kind, Run]] = {"number": _number, "text": _text, "bool": _bool, "time": read_time}
_SPARK_TYPE: Final = {"number": "DOUBLE", "bool": "BOOLEAN", "time": "TIMESTAMP"}
_EXACT_MAX: Final = 2**53  # whole numbers from here on are not all doubles


class _Term(NamedTuple):
    """A part of a condition: what it yields for one row, and how Spark says it."""

    kind: Kind
    run: Run
    sql: str
    constant: Any = MISSING
    whole: bool = False  # an integer in Spark, where arithmetic is to be on doubles


def _literal(value: Any, kind: Kind) -> _Term:
    if kind == "text":
        sql = _quoted(value)
    elif kind == "time":
        sql = f"TIMESTAMP '{value.isoformat(sep=' ')}'"
    elif kind == "number":
        sql = f"{value!r}D" if isinstance(value, float) else str(value)
    else:
        sql = {None: "NULL", True: "TRUE", False: "FALSE"}[value]
    return _Term(kind, lambda _: value, sql, value)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_NULL: Final = _literal(None, "null")


def _path_run(get: Run, steps: tuple[str | int, ...]) -> Run:
    if not steps:
        return get
    *before, last = steps

    def run(row: Row) -> Any:
        found = get(row)
        for step in before:
            found = _member(found, step)
        return found.get(last) if type(found) is dict else _member(found, last)

    return run


def _member(found: Any, step: str | int) -> Any:
    if isinstance(found, dict):
        return found.get(step)
    if isinstance(found, list | tuple) and type(step) is int and step < len(found):
        return found[step]
    return None


def _path_sql(column: str, steps: list[str | int]) -> str:
    if column == "headers":
        return f"headers[{_quoted(str(steps[0]))}]"
    if column == "caps":
        return f"GET(caps, {steps[0]})"
    if column != "payload":
        return f"`{column}`"
    if not steps:  # Spark reads a lone null as the text 'null'
        return "GET_JSON_OBJECT(NULLIF(payload, 'null'), '$')"
    path = "".join(f"[{s}]" if type(s) is int else _json_name(str(s)) for s in steps)
    return f"GET_JSON_OBJECT(payload, {_quoted('$' + path)})"


def _json_name(name: str) -> str:
    if re.fullmatch(r"\w+", name):
        return f".{name}"
    if name and name != "*" and not set("'?") & set(name):
        return f"['{name}']"
    raise InvalidFilter(f"Spark cannot reach a member called {name!r}", name=name)


def _lift(call: Callable[[Any], Any], term: _Term) -> Run:
    """``call`` of what ``term`` yields, NULL for NULL."""
    get = term.run

    def run(row: Row) -> Any:
        found = get(row)
        return None if found is None else call(found)

    return run


def _lift2(call: Callable[[Any, Any], Any], left: _Term, right: _Term) -> Run:
    if right.constant is not MISSING:
        get, constant = left.run, right.constant

        def against(row: Row) -> Any:
            found = get(row)
            return None if found is None else call(found, constant)

        return against
    one, other = left.run, right.run

    def run(row: Row) -> Any:
        a, b = one(row), other(row)
        return None if a is None or b is None else call(a, b)

    return run


_MATHS: Final[dict[str, tuple[str, Callable[[float, float], float]]]] = {
    "Add": ("+", operator.add),
    "Sub": ("-", operator.sub),
    "Mul": ("*", operator.mul),
    "Div": ("/", operator.truediv),
    "Mod": ("%", math.fmod),
}
_SIGNS: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "EQ": ("=", operator.eq),
    "NEQ": ("<>", operator.ne),
    "LT": ("<", operator.lt),
    "LTE": ("<=", operator.le),
    "GT": (">", operator.gt),
    "GTE": (">=", operator.ge),
}
_CALLS: Final[dict[str, tuple[Callable[[str], Any], Kind]]] = {
    "Lower": (str.lower, "text"),
    "Upper": (str.upper, "text"),
    "Length": (len, "number"),
}


def _arithmetic(name: str, left: _Term, right: _Term) -> _Term:
    """Numbers are doubles here, as in Spark; what has no answer, like division by 0, is NULL."""
    sign, apply = _MATHS[name]

    def call(a: float, b: float) -> float | None:
        try:
            value = apply(float(a), float(b))
        except (ZeroDivisionError, OverflowError, ValueError):
            return None
        return value if math.isfinite(value) else None

    divisor = _double(right) if sign not in "/%" else f"NULLIF({_double(right)}, 0D)"
    return _Term("number", _lift2(call, left, right), f"({_double(left)} {sign} {divisor})")


def _double(term: _Term) -> str:
    if term.constant is not MISSING:
        return "NULL" if term.constant is None else f"{float(term.constant)!r}D"
    return f"CAST({term.sql} AS DOUBLE)" if term.whole else term.sql


def _logic(word: Literal["AND", "OR"], terms: list[_Term]) -> _Term:
    """Three values: the deciding one ends the search, NULL leaves it open."""
    parts, decides = tuple(term.run for term in terms), word == "OR"

    def run(row: Row) -> Any:
        result: bool | None = not decides
        for part in parts:
            found = part(row)
            if found is decides:
                return found
            if found is None:
                result = None
        return result

    return _Term("bool", run, "(" + f" {word} ".join(term.sql for term in terms) + ")")


def _not(term: _Term) -> _Term:
    return _Term("bool", _lift(operator.not_, term), f"NOT ({term.sql})")


def _like(term: _Term, pattern: str, fold: bool, work: _Work) -> _Term:
    match = _like_test(pattern.lower() if fold else pattern, work)
    test = (lambda text: match(text.lower())) if fold else match
    word = "ILIKE" if fold else "LIKE"
    return _Term("bool", _lift(test, term), f"{term.sql} {word} {_quoted(pattern)}")


class _Piece(NamedTuple):
    """What a pattern has between two ``%``."""

    expression: re.Pattern[str]
    width: int
    has_gaps: bool  # it holds a ``_``: its search tries every place of the text anew


def _piece(tokens: list[str]) -> _Piece:
    source = "".join("." if token == "_" else re.escape(token[-1]) for token in tokens)
    return _Piece(re.compile(source, re.S), len(tokens), "_" in tokens)


def _like_test(pattern: str, work: _Work) -> Callable[[str], bool]:
    """Match piece by piece between the ``%``, leftmost first: one regular expression for the whole
    would backtrack. The search for a piece with a ``_`` takes its width times the text.
    """
    tokens: list[list[str]] = [[]]
    for token in re.findall(r"\\.|.", pattern, re.S):
        if token == "%":
            tokens.append([])
        else:
            tokens[-1].append(token)
    first, *others = map(_piece, tokens)
    if not others:
        return lambda text: first.expression.fullmatch(text) is not None
    *middle, last = others

    def test(text: str) -> bool:
        work.spend(len(text) // _CHARACTERS_A_UNIT)
        found = first.expression.match(text)
        for piece in middle:
            if found is None:
                return False
            if piece.has_gaps:
                work.spend(piece.width * (len(text) - found.end()))
            found = piece.expression.search(text, found.end())
        start = len(text) - last.width
        return (
            found is not None
            and start >= found.end()
            and last.expression.match(text, start) is not None
        )

    return test


_TWO: Final = frozenset({"this", "expression"})
# What a node of the parser may carry. Anything more is SQL outside the subset.
_ARGS: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys((*_SIGNS, *_MATHS, "And", "Or", "Is", "Dot"), _TWO),
    **dict.fromkeys(("Not", "Neg", "Paren", "Boolean", *_CALLS), frozenset({"this"})),
    **dict.fromkeys(("Like", "ILike"), _TWO | {"negate"}),
    **dict.fromkeys(("In", "Bracket"), frozenset({"this", "expressions"})),
    "Div": _TWO | {"typed", "safe"},
    "Between": frozenset({"this", "low", "high"}),
    "Literal": frozenset({"this", "is_string"}),
    "Null": frozenset(),
    "Column": frozenset({"this", "table", "db", "catalog"}),
}


class _Reader:
    """Reads the parser's tree into terms, and refuses what is outside the subset."""

    def __init__(self, text: str, tree: Any) -> None:
        self.text = text
        self.work = _Work(text)
        self.columns: set[str] = set()
        names = (node.parts[0].name.lower() for node in tree.walk() if _name(node) == "Column")
        self.on_record = not PLACE.isdisjoint(names)

    def refuse(self, tree: Any, why: str, hint: str = "") -> NoReturn:
        starts = (node.meta["start"] for node in tree.walk() if "start" in node.meta)
        _refuse(self.text, min(starts, default=0), why, hint)

    def open(self, tree: Any, depth: int) -> str:
        name = _name(tree)
        allowed = _ARGS.get(name)
        if allowed is None or any(v and k not in allowed for k, v in tree.args.items()):
            if name == "Anonymous":
                known = ", ".join(sorted(call.lower() for call in _CALLS))
                self.refuse(tree, f"there is no function {tree.name}", f"functions: {known}")
            self.refuse(tree, f"a where has no {name.upper()} of this form")
        if depth > DEPTH_MAX:
            self.refuse(tree, f"nested deeper than {DEPTH_MAX}")
        return name

    def condition(self, tree: Any, depth: int) -> _Term:
        name = self.open(tree, depth)
        below = depth + 1
        if name == "Paren":
            return self.condition(tree.this, below)
        if name in ("And", "Or"):
            parts = [self.condition(part, below) for part in _chain(tree)]
            return _logic("AND" if name == "And" else "OR", parts)
        if name == "Not":
            return _not(self.condition(tree.this, below))
        if name in _SIGNS:
            left, right = self.value(tree.this, below), self.value(tree.expression, below)
            return self.compare(tree, name, left, right)
        if name == "Is":
            if _name(tree.expression) != "Null":
                self.refuse(tree, "IS is followed by NULL or NOT NULL")
            term = self.value(tree.this, below)
            get = term.run
            return _Term("bool", lambda row: get(row) is None, f"{term.sql} IS NULL")
        if name == "In":
            return self.membership(tree, below)
        if name == "Between":
            term, low, high = (self.value(tree.args[k], below) for k in ("this", "low", "high"))
            bounds = [self.compare(tree, "GTE", term, low), self.compare(tree, "LTE", term, high)]
            return _logic("AND", bounds)
        if name in ("Like", "ILike"):
            return self.like(tree, name == "ILike", below)
        term = self.value(tree, depth)
        if term.kind not in ("any", "bool", "null"):
            self.refuse(tree, "this is a value, not a condition")
        return self.read(tree, term, "bool")

    def value(self, tree: Any, depth: int) -> _Term:
        name = self.open(tree, depth)
        below = depth + 1
        term: _Term | None = None
        if name == "Paren":
            term = self.value(tree.this, below)
        elif name in ("Column", "Dot", "Bracket"):
            term = self.path(tree)
        elif name == "Literal":
            term = _literal(tree.this, "text") if tree.is_string else self.numeral(tree)
        elif name == "Boolean":
            term = _literal(bool(tree.this), "bool")
        elif name == "Null":
            term = _NULL
        elif name in _MATHS:
            left = self.read(tree, self.value(tree.this, below), "number")
            right = self.read(tree, self.value(tree.expression, below), "number")
            term = _arithmetic(name, left, right)
        elif name == "Neg":
            term = self.read(tree, self.value(tree.this, below), "number")
            if term.constant is MISSING or term.constant is None:
                term = _arithmetic("Sub", _literal(0, "number"), term)
            else:
                term = _literal(-term.constant, "number")
        elif name in _CALLS:
            argument = self.read(tree, self.value(tree.this, below), "text")
            call, kind = _CALLS[name]
            sql = f"{name.upper()}({argument.sql})"
            term = _Term(kind, _lift(self.counted(call), argument), sql, whole=kind == "number")
        return term or self.refuse(tree, "this is a condition, not a value")

    def counted(self, call: Callable[[str], Any]) -> Callable[[str], Any]:
        """``call`` of a text, paid for by its length."""
        work = self.work

        def run(text: str) -> Any:
            work.spend(len(text) // _CHARACTERS_A_UNIT)
            return call(text)

        return run

    def numeral(self, tree: Any) -> _Term:
        value = _number(tree.this)
        if value is None or abs(value) >= 1e300:
            self.refuse(tree, f"not a number: {tree.this[:40]}")
        return _literal(value, "number")

    def path(self, tree: Any) -> _Term:
        steps: list[str | int] = []
        here = tree
        while self.open(here, 0) in ("Dot", "Bracket"):
            inner = [here.expression] if _name(here) == "Dot" else here.expressions
            if len(inner) != 1:
                self.refuse(here, "one index at a time")
            steps.insert(0, self.step(inner[0]))
            here = here.this
        if _name(here) != "Column":
            self.refuse(tree, "a path starts with a column")
        parts = [here.args[k] for k in ("catalog", "db", "table", "this") if here.args.get(k)]
        first, *names = [self.step(part) for part in parts]
        column, steps = str(first).lower(), [*names, *steps]
        kind = COLUMNS.get(column)
        if kind is None:
            self.refuse(tree, f"there is no column {first!r}", _column_hint(self.text, str(first)))
        if (
            kind in ("map", "list")
            and len(steps) == 1
            and type(steps[0]) is (str, int)[kind == "list"]
        ):
            kind = "text"
        elif kind in ("map", "list") or (kind != "any" and steps):
            self.refuse(tree, f"{column} cannot be used like this")
        self.columns.add(column)
        inside = self.on_record and column not in PLACE
        run = _path_run(attrgetter("event." + column if inside else column), tuple(steps))
        return _Term(kind, run, _path_sql(column, steps), whole=column in PLACE)

    def step(self, tree: Any) -> str | int:
        literal = _name(tree) == "Literal"
        if _name(tree) != "Identifier" and not (literal and (tree.is_string or tree.is_int)):
            self.refuse(tree, "a path is made of names and of numbers from 0")
        return int(tree.this) if literal and not tree.is_string else str(tree.this)

    def read(self, tree: Any, term: _Term, kind: Kind) -> _Term:
        """``term`` as ``kind``: a constant at once, what is stored when an event comes."""
        if term.kind in (kind, "null"):
            return term
        if term.kind not in ("any", "text"):
            self.refuse(tree, f"a {term.kind} cannot be read as a {kind}")
        read = _READ[kind]
        if term.constant is not MISSING:
            value = read(term.constant)
            if value is None:
                self.refuse(tree, f"{term.constant[:40]!r} cannot be read as a {kind}")
            return _literal(value, kind)
        get = term.run
        if kind == "text":
            return _Term(kind, self.as_text(get), term.sql)
        sql = f"TRY_CAST({term.sql} AS {_SPARK_TYPE[kind]})"
        return _Term(kind, lambda row: read(get(row)), sql)

    def as_text(self, get: Run) -> Run:
        """A stored value as text. An object or a list is encoded, and paid for by its length."""
        work = self.work

        def run(row: Row) -> str | None:
            found = get(row)
            text = _text(found)
            if text is not None and text is not found:
                work.spend(len(text) // _CHARACTERS_A_UNIT)
            return text

        return run

    def compare(self, tree: Any, name: str, left: _Term, right: _Term) -> _Term:
        kinds = {left.kind, right.kind}
        if name not in ("EQ", "NEQ") and "`priority`" in (left.sql, right.sql):
            hint = "for example: priority in ('high', 'critical')"
            self.refuse(tree, "a priority is a name and has no < or >", hint)
        if "null" in kinds:
            return _NULL
        if kinds == {"any"}:
            return self.alike(tree, name, left, right)
        order: tuple[Kind, ...] = ("time", "number", "bool", "text")
        kind = next(kind for kind in order if kind in kinds)
        sign, test = _SIGNS[name]
        a, b = self.read(tree, left, kind), self.read(tree, right, kind)
        if kind == "number" and a.constant is b.constant is MISSING:
            a, b = (side._replace(run=_lift(_float, side)) for side in (a, b))
        sql = f"{a.sql} {sign} {b.sql}"
        if any(type(c) is int and abs(c) >= _EXACT_MAX for c in (a.constant, b.constant)):
            exact = (
                x.sql if x.sql == y.sql else _decimal(x.sql) for x, y in ((left, a), (right, b))
            )
            sql = f"COALESCE({f' {sign} '.join(exact)}, {sql})"
        return _Term("bool", _lift2(test, a, b), sql)

    def alike(self, tree: Any, name: str, left: _Term, right: _Term) -> _Term:
        """Two payload values: as doubles if both can be read as numbers, else as text."""
        numbers = self.compare(tree, name, self.read(tree, left, "number"), right)
        texts = self.compare(tree, name, self.read(tree, left, "text"), right)
        first, second = numbers.run, texts.run

        def run(row: Row) -> Any:
            found = first(row)
            return second(row) if found is None else found

        return _Term("bool", run, f"COALESCE({numbers.sql}, {texts.sql})")

    def membership(self, tree: Any, depth: int) -> _Term:
        term = self.value(tree.this, depth)
        values = [self.value(one, depth) for one in tree.expressions]
        kinds = {value.kind for value in values}
        if not values:
            self.refuse(tree, "IN takes a list of values")
        constants = [value.constant for value in values]
        if term.kind in ("any", "text") and kinds == {"text"} and MISSING not in constants:
            among = frozenset(constants)
            term = self.read(tree, term, "text")
            sql = f"{term.sql} IN ({', '.join(value.sql for value in values)})"
            return _Term("bool", _lift(among.__contains__, term), sql)
        return _logic("OR", [self.compare(tree, "EQ", term, value) for value in values])

    def like(self, tree: Any, fold: bool, depth: int) -> _Term:
        pattern = tree.expression
        if _name(pattern) != "Literal" or not pattern.is_string:
            self.refuse(tree, "LIKE takes a pattern in quotes")
        if "\\" in re.sub(r"\\[\\%_]", "", pattern.this):
            self.refuse(pattern, "in a pattern \\ stands before %, _ or \\")
        term = _like(
            self.read(tree, self.value(tree.this, depth), "text"), pattern.this, fold, self.work
        )
        return _not(term) if tree.args.get("negate") else term


def _decimal(sql: str) -> str:
    return f"TRY_CAST({sql} AS DECIMAL(38, 9))"


def _name(tree: Any) -> str:
    return type(tree).__name__


def _chain(tree: Any) -> list[Any]:
    """``a AND b AND c`` as a list: the parser nests it once per word."""
    kind, parts = type(tree), []
    while type(tree) is kind:
        parts.append(tree.expression)
        tree = tree.this
    return [tree, *reversed(parts)]
