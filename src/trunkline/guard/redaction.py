"""Take personal data out of events before they are encoded.

A rule finds text by a pattern and, where the data has a checksum, by that as well. A text that a
rule finds is replaced by the rule's mark; the event's band rises to the rule's band, the rule's
capabilities are added, and the header ``redacted`` counts the findings by rule. The redactor is
publish middleware: a text it has replaced never reaches an encoder, a socket or a disk.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from trunkline.codec import decode_payload, to_plain
from trunkline.errors import InvalidEvent, InvalidOption
from trunkline.event import BANDS, Band, Event, Receipt
from trunkline.guard.config import convert, read_toml
from trunkline.guard.order import check_order
from trunkline.middleware import PublishNext

HEADER: Final = "redacted"
_META: Final = ("type", "actor", "subject", "key", "idem_key")
_DEPTH: Final = 200  # deeper payloads are refused by the bus itself
Accept = Callable[[str], bool]


class Rule(msgspec.Struct, frozen=True):
    """``accept`` decides over a text that ``pattern`` matched; with a group ``hit``, over that part
    alone. ``hint`` is a quick test: a text without any of these characters holds no match.
    ``numbers`` applies the rule to JSON numbers.
    """

    name: str
    pattern: re.Pattern[str]
    mark: str
    band: Band = "AMBER"
    caps: tuple[str, ...] = ()
    accept: Accept | None = None
    hint: str = ""
    numbers: bool = False

    def replace(self, text: str) -> tuple[str, int]:
        """The text with the rule's mark in place of each finding, and how many there were. Text
        that is written with other characters for the same is found as well: see ``folded``.
        """
        count = 0
        if not text.isascii():
            plain, places = folded(text)
            if plain != text:
                text, count = self._replace(text, plain, places)
        text, more = self._replace(text, text, None)
        return text, count + more

    def _replace(self, text: str, plain: str, places: list[int] | None) -> tuple[str, int]:
        """Search in ``plain`` and replace in ``text``: ``places`` says where its characters are."""
        if self.hint and not any(char in plain for char in self.hint):
            return text, 0
        parts: list[str] = []
        named = "hit" in self.pattern.groupindex
        end = 0
        for found in self.pattern.finditer(plain):
            part = "hit" if named and found["hit"] is not None else 0
            if self.accept is not None and not self.accept(found[part]):
                continue
            first, last = found.span(part)
            if first == last:
                continue
            if places is not None:
                first, last = places[first], places[last - 1] + 1
            parts += (text[end:first], self.mark)
            end = last
        return ("".join((*parts, text[end:])), len(parts) // 2) if parts else (text, 0)


def folded(text: str) -> tuple[str, list[int]]:
    """A text without characters of no width, with ASCII for digits, spaces, dashes and full-width
    letters of any script, and the place of each character in the text.
    """
    found: list[str] = []
    places: list[int] = []
    for place, char in enumerate(text):
        plain = char if char < "\x7f" else _fold(char)
        if plain:
            found.append(plain)
            places.append(place)
    return "".join(found), places


@lru_cache(4096)
def _fold(char: str) -> str:
    kind = unicodedata.category(char)
    if kind in ("Cf", "Mn", "Me") and not unicodedata.combining(char):
        return ""  # of no width
    if kind == "Nd":
        return str(unicodedata.decimal(char))
    if kind == "Zs":
        return " "
    if kind == "Pd" or char == "\u2212":
        return "-"
    if char in "\u3002\uff61":
        return "."
    plain = unicodedata.normalize("NFKC", char)
    return plain if len(plain) == 1 and plain.isascii() else char


def luhn(text: str) -> bool:
    """Whether the digits of a text end in their Luhn check digit (ISO/IEC 7812)."""
    digits = [int(char) for char in text if char.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return len(digits) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


# First digits and lengths that card networks have issued.
_CARDS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
    r"|220[0-5]\d{12,15}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|6(?:011|5\d\d|4[4-9]\d)\d{12}"
    r"|35\d{14}|(?:1800|2131)\d{11}|62\d{14,17}|(?:5[06-8]|6[0379])\d{10,17}|0604\d{8}"
)
# As a number is printed on a card; then an issuer that is not known counts as well.
_PRINTED = re.compile(r"[2-6]\d{3}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?")


def is_card(text: str) -> bool:
    """Whether a text is a card number: a Luhn digit, and either a known issuer and a length of that
    issuer, or the groups of four in which cards are printed.
    """
    digits = re.sub(r"\D", "", text)
    is_shaped = _CARDS.fullmatch(digits) or _PRINTED.fullmatch(text)
    return is_shaped is not None and luhn(digits)


def is_phone(text: str) -> bool:
    """Whether a text that is shaped like a phone number has as many digits as one may have
    (ITU E.164), and is no date, amount, address of a machine or number of a book.
    """
    number = _EXTENSION.sub("", text.strip())
    groups = re.findall(r"\d+", number)
    digits = "".join(groups)
    if not 7 <= len(digits) <= 15 or len(set(digits)) < 3:
        return False
    if number.startswith("+"):
        return True
    if _DATE.search(number):
        return False
    between = set(re.sub(r"[\d()+]", "", number))
    if not between and "(" not in number:  # digits alone
        return not (len(digits) == 13 and _is_ean(digits))
    return _is_national(number, [len(group) for group in groups], between)


def _is_national(number: str, sizes: list[int], between: set[str]) -> bool:
    """Whether the groups of a number without a country code are those of a phone number."""
    count = sum(sizes)
    is_trunk = number.lstrip("(").startswith("0") or "(" in number
    most = 15 if number.startswith("00") else 13 if is_trunk else 12
    if not 8 <= count <= most:
        return len(sizes) == 3 and sizes == [3, 2, 2] and between == {"-"}
    if sizes[-1] < 2 or (sizes[-1] < 3 and len(sizes) < 4 and not is_trunk):
        return False
    if len(sizes) == 2 and "(" not in number:  # but not the postcodes 01234-5678 and 01234-567
        return is_trunk and sizes not in ([5, 4], [5, 3]) and between != {"."}
    if sizes[0] == 1 and not is_trunk and not _ONE.match(number):
        return False
    if between == {"."} and "(" not in number:
        return tuple(sizes) in _DOTTED
    if between == {" "} and not is_trunk and set(sizes[1:]) == {3}:
        return sizes == [3, 3, 3] and number[0] in "56789"  # else an amount: 12 345 678
    if "." in between and number.rpartition(".")[2].isdigit() and between != {"."}:
        return "(" in number  # else the end of an amount: 12 345.67
    return not (len(sizes) >= 6 and set(sizes) == {2})  # the address of a network card


def _is_ean(digits: str) -> bool:
    """Whether 13 digits end in the check digit of an article (GS1)."""
    total = sum(int(char) * (3 if at % 2 else 1) for at, char in enumerate(digits))
    return total % 10 == 0


_DOTTED: Final = {(3, 3, 4), (2, 2, 2, 2, 2), (4, 3, 3), (1, 3, 3, 4), (3, 3, 3, 4)}
_ONE = re.compile(r"[178][ .-]?[2-9]\d\d[ .-]?[2-9]\d\d|8[ -]")
_YEAR = r"(?:19|20)\d\d"
_DATE = re.compile(
    rf"(?<!\d)(?:{_YEAR}[-. /]\d\d?[-. /]\d\d?|\d\d?[-. /]\d\d?[-. /]{_YEAR}"
    rf"|{_YEAR} ?[-/] ?{_YEAR}|{_YEAR} \d+)(?!\d)"
)
_EXTENSION = re.compile(r" ?(?:x|ext\.?) ?\d{1,6}$")
_LABEL = r"[^\W_](?:[^\W_]|-){0,62}"
_ATOM = r"[\w!#$%&'*+/=?^`{|}~-]{1,64}"
_EMAIL = re.compile(
    rf"(?:(?<![\w.%+/=-]){_ATOM}(?:\.{_ATOM}){{0,8}}|(?<!\w)\"[^\"@\\\n]{{1,62}}\")"
    rf"@(?:{_LABEL}\.){{1,8}}(?:[^\W\d_]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![\w-])"
)
_SEPARATED = r"\d(?:[ -]?\d){11,18}"
# No part of a longer number, word, path or address.
_START = r"(?<![\w+])(?<!\w[./-])(?<!\d[ ,:])"
_CARD = re.compile(rf"{_START}(?:{_SEPARATED})(?![\w]|[.,:/-]\d| \d)")
_GROUP = r"(?:\(\d{1,4}\)|\d{1,9})"
_CALLED = r"(?:tel|phone|mobile?|mob|cell|fax|call|telefon|téléphone|teléfono|handy|sms|whatsapp)"
_PHONE = re.compile(
    rf"{_START}(?>(?:"
    # International: +44 20 7946 0958, +1 (212) 555-0173, +49(0)30 901820, 0049 30 901820
    r"\+[1-9]\d{0,2}(?:[ .-]?\(0\))?(?:[ ./-]?\(?\d{1,5}\)?){2,6}"
    # In groups, as a country writes them: is_phone looks at the groups
    rf"|(?:\(\+?\d{{1,5}}\)|\d{{1,6}})(?:[ ]?[-/.][ ]?{_GROUP}|[ ]{_GROUP}|(?<=\))[./]?{_GROUP}"
    rf"|\(\d{{1,4}}\)){{1,7}}"
    # Digits alone: with a trunk zero or two, or a mobile number of China
    r"|0[1-9]\d{8,9}|00[1-9]\d{8,12}|1[3-9]\d{9}"
    r")(?:[ ]?(?:x|ext\.?)[ ]?\d{1,6})?)(?![\w@]|[.,:/-]\w)"
    # Digits alone behind a word that says what they are: tel. 5863828890
    rf"|(?i:(?<!\w){_CALLED}\w{{0,8}}[ .:=#\"']{{1,4}})(?P<hit>\d{{7,15}})(?![\w@]|[.,:/-]\w)"
)

READY: Final[dict[str, Rule]] = {
    rule.name: rule
    for rule in (
        Rule("email", _EMAIL, "[email]", hint="@"),
        Rule("card", _CARD, "[card]", "RED", ("pci",), is_card, hint="0123456789", numbers=True),
        Rule("phone", _PHONE, "[phone]", accept=is_phone, hint="0123456789"),
    )
}


class _RuleTable(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    pattern: str
    mark: str = ""
    band: Band = "AMBER"
    caps: tuple[str, ...] = ()
    ignore_case: bool = False
    luhn: bool = False
    numbers: bool = False


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """The table ``[redaction]``; custom rules are its ``[[redaction.rule]]``."""

    rules: tuple[str, ...] = tuple(READY)
    paths: tuple[str, ...] = ()
    path_band: Band = "AMBER"
    path_caps: tuple[str, ...] = ()
    meta: Literal["keep", "refuse"] = "keep"
    rule: tuple[_RuleTable, ...] = ()


class Findings:
    """How often each rule found something in one event."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.band = 0
        self.caps: set[str] = set()

    def add(self, name: str, count: int, band: Band, caps: Iterable[str]) -> None:
        self.counts[name] += count
        self.band = max(self.band, BANDS.index(band))
        self.caps.update(caps)


class Redactor:
    """Publish middleware. ``paths`` are dotted places in the payload, ``*`` for any one step:
    ``patient.name``, ``items.*.card``. The value at a path is replaced whatever it is.

    ``meta="refuse"`` raises ``InvalidEvent`` when a rule finds something in an event's type, actor,
    subject, key or idem_key: those fields route the event, so they are never rewritten.
    """

    stage: Final = "redact"

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        *,
        paths: Sequence[str] = (),
        path_band: Band = "AMBER",
        path_caps: Sequence[str] = (),
        meta: Literal["keep", "refuse"] = "keep",
    ) -> None:
        self.rules = tuple(READY.values()) if rules is None else tuple(rules)
        names = [rule.name for rule in self.rules]
        if doubled := {name for name in names if names.count(name) > 1 or not name}:
            raise InvalidOption(f"two rules are called {sorted(doubled)}", name="rules")
        for band in (path_band, *(rule.band for rule in self.rules)):
            if band not in BANDS:
                hint = f"bands: {', '.join(BANDS)}"
                raise InvalidOption(f"there is no band {band!r}", name="band", hint=hint)
        if meta not in ("keep", "refuse"):
            raise InvalidOption(f"meta is keep or refuse, not {meta!r}", name="meta")
        self._paths = _tree(paths)
        self._path_band: Band = path_band
        self._path_caps = tuple(path_caps)
        self._meta = meta
        self._numbers = tuple(rule for rule in self.rules if rule.numbers)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Redactor:
        """The redactor that the table ``[redaction]`` of a file describes."""
        found = read_toml(path).get("redaction")
        if found is None:
            raise InvalidOption(f"{os.fspath(path)} has no table [redaction]", name="redaction")
        table = convert(found, _Table, "redaction")
        if unknown := [name for name in table.rules if name not in READY]:
            hint = f"ready rules: {', '.join(READY)}"
            raise InvalidOption(f"there is no ready rule {unknown[0]!r}", name="rules", hint=hint)
        rules = [READY[name] for name in table.rules]
        return cls(
            [*rules, *map(_custom, table.rule)],
            paths=table.paths,
            path_band=table.path_band,
            path_caps=table.path_caps,
            meta=table.meta,
        )

    def redact(self, event: Event) -> Event:
        """The event without the data that the rules find; the same object if they find nothing."""
        findings = Findings()
        if self._meta == "refuse":
            self._check_meta(event)
        payload = self._value(event.payload, self._paths, findings, 0)
        headers = self._object(event.headers, None, findings, 0)
        if not findings.counts:
            return event
        counted = ",".join(f"{name}:{count}" for name, count in sorted(findings.counts.items()))
        return msgspec.structs.replace(
            event,
            payload=payload,
            headers={**headers, HEADER: counted},
            band=BANDS[max(findings.band, BANDS.index(event.band))],
            caps=tuple(dict.fromkeys((*event.caps, *sorted(findings.caps)))),
        )

    def text(self, text: str) -> str:
        """One text without the data that the rules find."""
        return self._text(text, Findings())

    def placed(self, outer: Sequence[object]) -> None:
        check_order(self.stage, outer)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        return await call_next([self.redact(event) for event in events])

    def _check_meta(self, event: Event) -> None:
        for field in _META:
            value = getattr(event, field)
            for rule in self.rules if value else ():
                if rule.replace(value)[1]:
                    raise InvalidEvent(
                        f"the event's {field} holds personal data ({rule.name})",
                        field=field,
                        rule=rule.name,
                        hint="publish a reference, such as an account number, in its place",
                    )

    def _text(self, text: str, findings: Findings) -> str:
        for rule in self.rules:
            text, count = rule.replace(text)
            if count:
                findings.add(rule.name, count, rule.band, rule.caps)
        return text

    def _value(
        self, value: Any, paths: dict[str, Any] | None, findings: Findings, deep: int
    ) -> Any:
        """The value redacted. A part in which nothing is found stays the same object."""
        if paths is not None and "" in paths and value is not None:
            findings.add("path", 1, self._path_band, self._path_caps)
            return "[path]"
        kind = type(value)
        if kind is str:
            return self._text(value, findings)
        if value is None or kind is bool:
            return value
        if kind is int or kind is float:
            return self._number(value, findings)
        if deep > _DEPTH:
            return value  # the bus refuses it
        if kind is dict:
            return self._object(value, paths, findings, deep)
        if kind is list or kind is tuple:
            parts = [self._value(item, _step(paths, "*"), findings, deep + 1) for item in value]
            same = all(new is old for new, old in zip(parts, value, strict=True))
            return value if same else parts
        if kind is msgspec.Raw:
            return self._value(decode_payload(bytes(value)), paths, findings, deep + 1)
        try:
            plain = to_plain(value)
        except (TypeError, ValueError):
            return value  # no JSON value: the encoder says so
        return self._value(plain, paths, findings, deep + 1)

    def _object(
        self, value: dict[Any, Any], paths: dict[str, Any] | None, findings: Findings, deep: int
    ) -> dict[Any, Any]:
        fresh: dict[Any, Any] = {}
        is_same = True
        for name, item in value.items():
            new_name = self._text(name, findings) if isinstance(name, str) else name
            while new_name != name and (new_name in fresh or new_name in value):
                new_name += "_"  # two members with personal names stay two members
            new = self._value(item, _step(paths, str(name)), findings, deep + 1)
            fresh[new_name] = new
            is_same = is_same and new is item and new_name == name
        return value if is_same else fresh

    def _number(self, value: float, findings: Findings) -> Any:
        """A number is looked at as the whole number that it is, if it is one."""
        if self._numbers and 10**11 < abs(value) < 10**20 and value == int(value):
            for rule in self._numbers:
                text, count = rule.replace(str(int(value)))
                if count:
                    findings.add(rule.name, count, rule.band, rule.caps)
                    return text
        return value


def _step(paths: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    if paths is None:
        return None
    exact, wild = paths.get(name), paths.get("*")
    if exact is None or wild is None or exact is wild:
        return exact or wild
    return _merged(exact, wild)


def _merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    both = left.keys() & right.keys()
    return left | right | {name: _merged(left[name], right[name]) for name in both}


def _tree(paths: Sequence[str]) -> dict[str, Any] | None:
    """Paths as nested steps; the step ``""`` says that a path ends there."""
    root: dict[str, Any] = {}
    for path in paths:
        steps = path.split(".") if isinstance(path, str) else [""]
        if not all(steps):
            raise InvalidOption(f"not a path: {path!r}", name="paths", hint="like patient.name")
        place = root
        for step in steps:
            place = place.setdefault(step, {})
        place[""] = {}
    return root or None


def _custom(table: _RuleTable) -> Rule:
    try:
        pattern = re.compile(table.pattern, re.IGNORECASE if table.ignore_case else 0)
    except re.error as error:
        said = f"redaction rule {table.name}: not a pattern: {error}"
        raise InvalidOption(said, name=table.name) from None
    if pattern.fullmatch(""):
        said = f"redaction rule {table.name}: the pattern matches an empty text"
        raise InvalidOption(said, name=table.name)
    mark = table.mark or f"[{table.name}]"
    accept = luhn if table.luhn else None
    return Rule(table.name, pattern, mark, table.band, table.caps, accept, numbers=table.numbers)
