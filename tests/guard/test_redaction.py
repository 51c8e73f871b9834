"""Personal data is gone before an event is encoded."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trunkline
from trunkline.errors import InvalidEvent, InvalidOption, NotFound
from trunkline.event import Event
from trunkline.guard.redaction import READY, Redactor, Rule, is_card, luhn

from .texts import Text, texts

ANNA = "anna.meyer@example.com"
CARD = "4111 1111 1111 1111"


class Measured:
    """Precision and recall of each rule. A text counts as found if nothing of it is left: not even
    its first or its last four characters where they stood.
    """

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()
        self.lost = 0

    def add(self, redactor: Redactor, one: Text) -> None:
        clean = redactor.text(one.text)
        marks = Counter(re.findall(r"\[(email|card|phone)\]", clean))
        for rule in READY:
            there = one.held.get(rule, [])
            gone = sum(_is_gone(text, one.text, clean) for text in there)
            self._found[rule] += gone
            self._missed[rule] += len(there) - gone
            self._wrong[rule] += max(0, marks[rule] - gone)
        self.lost += sum(1 for decoy in one.decoys if decoy not in clean)

    def table(self) -> tuple[str, dict[str, tuple[float, float]]]:
        lines, figures = ["rule   texts  precision  recall"], {}
        for rule in READY:
            found, missed, wrong = self._found[rule], self._missed[rule], self._wrong[rule]
            precision, recall = found / (found + wrong), found / (found + missed)
            figures[rule] = precision, recall
            lines.append(f"{rule:<6} {found + missed:>5}  {precision:>9.4f}  {recall:.4f}")
        return "\n".join([*lines, f"decoys changed: {self.lost}"]), figures


def _is_gone(text: str, whole: str, clean: str) -> bool:
    start = whole.index(text)
    end = start + len(text)
    edges = (whole[max(0, start - 2) : start + 4], whole[end - 4 : end + 2])
    return text not in clean and not any(edge in clean for edge in edges)


def event(payload: Any, **fields: Any) -> Event:
    return Event(topic="notes", payload=payload, **fields)


def everything(place: Path) -> bytes:
    return b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())


def test_precision_and_recall_of_each_rule_over_10_000_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    redactor, measured = Redactor(), Measured()
    for text in texts(10_000):
        measured.add(redactor, text)
    table, figures = measured.table()
    with capsys.disabled():
        print(f"\n{table}")
    for rule, (precision, recall) in figures.items():
        assert precision >= 0.97, rule
        assert recall >= 0.93, rule


def test_precision_and_recall_over_texts_of_a_generator_that_knows_no_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Faker's numbers and addresses of thirty countries. What is missed of phone numbers are digits
    alone, without a trunk zero and without a word that says what they are.
    """
    pytest.importorskip("faker")
    from .faker_texts import texts as faker_texts

    redactor, measured = Redactor(), Measured()
    for _, text in faker_texts(6_000):
        measured.add(redactor, text)
    table, figures = measured.table()
    with capsys.disabled():
        print(f"\n{table}")
    for rule, least in {"email": 0.99, "card": 0.98, "phone": 0.88}.items():
        precision, recall = figures[rule]
        assert precision >= 0.98, rule
        assert recall >= least, rule


@pytest.mark.parametrize(
    "number",
    [
        *("+44 20 7946 0958", "+1 (212) 555-0173", "+49(0)30 901820", "0049 30 901820"),
        *("(212) 555-0173", "212-555-0173 x12", "01 42 68 53 00", "0171 1234567", "(07) 6016 3770"),
        *("8 (532) 742-31-79", "08-714 92 54", "32 410 94 66", "95 9491-7452", "13812345678"),
        *("090-1234-5678", "0433.501.280", "tel. 5863828890", "0961183159", "63 03 22 39"),
        *("\uff0b44 20 7946 0958", "+44\u200b20 7946\u00a00958", "+44 20 \u0667946 0958"),
    ],
)
def test_phone_numbers_are_found_as_countries_write_them(number: str) -> None:
    assert re.fullmatch(r"(tel\. )?\[phone\]", Redactor().text(number)), number


@pytest.mark.parametrize(
    "text",
    [
        *(
            "2026-11-18 14",
            "18.11.2026 14",
            "2010-2015",
            "192.168.10.25",
            "12 345 678",
            "12 345.67",
        ),
        *(
            "978-3-16-148410-0",
            "01234-5678",
            "07054-774",
            "00-1B-44-11-3A-B7",
            "52.520008, 13.404954",
        ),
        *("5 284 818 4714 units", "1.234.567,89", "order 1000234567", "v10.4.2.1234", "3:45-4:30"),
        "DE89 3704 0044 0532 0130 00",
    ],
)
def test_what_looks_like_a_phone_number_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("anna+news@example.com", "bücher@müller.de", "anna@例え.jp", "用户@example.com"),
        *('"anna meyer"@example.com', "anna\u200b@example.com", "anna\uff20example.com"),
        *("4111\u00a01111\u00a01111\u00a01111", "4111\u20111111\u20111111\u20111111"),
        *("4111\u200b111111111111", "\uff14111111111111111", "3782 822463 10005"),
    ],
)
def test_other_characters_for_the_same_text_hide_nothing(text: str) -> None:
    assert re.fullmatch(r"\[(email|card)\]", Redactor().text(text)), text


def test_header_names_and_floats_are_redacted() -> None:
    clean = Redactor().redact(
        event(
            {"card": 4111111111111111.0, "rate": 0.5, "big": 1e300}, headers={ANNA: "x", CARD: "y"}
        )
    )
    assert clean.payload == {"card": "[card]", "rate": 0.5, "big": 1e300}
    assert clean.headers == {"[email]": "x", "[card]": "y", "redacted": "card:2,email:1"}
    for odd in (float("inf"), float("nan")):
        Redactor().redact(event(odd))


@pytest.mark.parametrize("text", [ANNA, CARD, "+49 30 9018200", "o'neil+x@mail.acme.io"])
def test_a_finding_is_replaced_wherever_it_stands(text: str) -> None:
    clean = Redactor().redact(
        event({"a": [text, {"b": f"write {text}, please"}], text: 1}, headers={"from": text})
    )
    assert text not in msgspec.json.encode(clean).decode()


def test_an_event_without_findings_is_the_same_object() -> None:
    plain = event({"a": [1, 2.5, None, True, "2026-11-18"], "b": {"c": "order 1000234567"}})
    assert Redactor().redact(plain) is plain


def test_findings_raise_band_and_capabilities_and_are_counted() -> None:
    clean = Redactor().redact(event([ANNA, ANNA, CARD], caps=("read",)))
    assert clean.band == "RED"
    assert clean.caps == ("read", "pci")
    assert clean.headers["redacted"] == "card:1,email:2"
    assert Redactor().redact(event(ANNA)).band == "AMBER"
    assert Redactor().redact(event(ANNA, band="BLACK")).band == "BLACK"


def test_a_card_number_may_be_a_json_number() -> None:
    clean = Redactor().redact(event({"card": 4111111111111111, "order": 4111111111111112}))
    assert clean.payload == {"card": "[card]", "order": 4111111111111112}


def test_a_path_is_replaced_whatever_it_holds() -> None:
    redactor = Redactor([], paths=["patient.name", "items.*.note", "*.pin"], path_band="RED")
    clean = redactor.redact(
        event(
            {
                "patient": {"name": {"first": "A"}, "age": 7, "pin": 1},
                "items": [{"note": 1, "sku": 2}, {"note": None}],
            }
        )
    )
    assert clean.payload == {
        "patient": {"name": "[path]", "age": 7, "pin": "[path]"},
        "items": [{"note": "[path]", "sku": 2}, {"note": None}],
    }
    assert (clean.band, clean.headers["redacted"]) == ("RED", "path:3")


def test_a_payload_of_any_kind_is_redacted() -> None:
    class Person(msgspec.Struct):
        mail: str

    redactor = Redactor()
    assert redactor.redact(event(Person(ANNA))).payload == {"mail": "[email]"}
    assert redactor.redact(event(msgspec.Raw(f'["{ANNA}"]'.encode()))).payload == ["[email]"]
    assert redactor.redact(event({"people": (Person(ANNA),)})).payload == {
        "people": [{"mail": "[email]"}]
    }


def test_two_members_with_personal_names_stay_two() -> None:
    clean = Redactor().redact(event({ANNA: 1, "ben@example.com": 2}))
    assert sorted(clean.payload.values()) == [1, 2]
    assert "@" not in str(clean.payload)


def test_personal_data_in_routing_fields_is_refused_if_asked() -> None:
    redactor = Redactor(meta="refuse")
    with pytest.raises(InvalidEvent, match="key holds personal data"):
        redactor.redact(event(1, key=ANNA))
    assert Redactor().redact(event(1, key=ANNA)).key == ANNA


def test_rules_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guard.toml"
    path.write_text(
        """
        [redaction]
        rules = ["email"]
        paths = ["secret"]
        path_caps = ["vault"]
        [[redaction.rule]]
        name = "ticket"
        pattern = 'tck-\\d{6}'
        ignore_case = true
        band = "BLACK"
        caps = ["support"]
        """
    )
    clean = Redactor.from_toml(path).redact(event({"t": "TCK-123456", "c": CARD, "secret": 1}))
    assert clean.payload == {"t": "[ticket]", "c": CARD, "secret": "[path]"}
    assert (clean.band, set(clean.caps)) == ("BLACK", {"support", "vault"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[redaction]\nrules = ['mail']", "no ready rule 'mail'"),
        ("[redaction]\npath = ['a']", "no field path"),
        ("[redaction]\npaths = ['a..b']", "not a path"),
        ("[[redaction.rule]]\nname='x'\npattern='('", "not a pattern"),
        ("[[redaction.rule]]\nname='x'\npattern='a*'", "matches an empty text"),
        ("[[redaction.rule]]\nname='email'\npattern='a'", "two rules are called"),
        ("[redaction]\npath_band='PINK'", "PINK"),
        ("redaction", "is not TOML"),
        ("", "no table"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "guard.toml"
    path.write_text(text)
    with pytest.raises(InvalidOption, match=re.escape(said)):
        Redactor.from_toml(path)
    with pytest.raises(NotFound):
        Redactor.from_toml(tmp_path / "none.toml")


def test_luhn_finds_every_single_wrong_digit() -> None:
    number = "4111111111111111"
    assert luhn(number)
    for at in range(len(number)):
        for digit in "0123456789":
            if digit != number[at]:
                assert not luhn(number[:at] + digit + number[at + 1 :])
    assert not is_card("9999 9999 9999 9995")  # a Luhn digit, and no issuer


async def test_no_file_of_the_bus_holds_what_was_redacted(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url, middleware=[Redactor()]) as bus:
        await bus.publish("notes", {"text": f"I am {ANNA}", "card": CARD})
        await bus.publish_many("notes", [ANNA, {"deep": [[ANNA]]}])
    data = everything(tmp_path)
    assert ANNA.encode() not in data
    assert CARD.encode() not in data
    assert data.count(b"[email]") >= 3


def test_a_rule_of_ones_own() -> None:
    rule = Rule("iban", re.compile(r"[A-Z]{2}\d{20}"), "[iban]", "RED")
    assert Redactor([rule]).text("DE89370400440532013000") == "[iban]"
