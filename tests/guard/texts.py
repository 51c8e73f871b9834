"""Texts like those that people write, with the personal data in them known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class Text(NamedTuple):
    text: str
    held: dict[str, list[str]]  # by rule: the texts that must go
    decoys: list[str]  # texts that look alike and must stay


FIRST = ["anna", "ben", "chloé", "david", "emre", "fatima", "george", "hana", "köksal", "li"]
LAST = ["meyer", "smith", "garcia", "o'neil", "nguyen", "rossi", "kowalski", "tanaka", "silva"]
HOSTS = ["example.com", "mail.example.co.uk", "uni-köln.example".replace("ö", "oe"), "acme.io"]
TLDS = ["com", "org", "de", "co.uk", "photography", "io", "fr"]
FRAMES = [
    "Please contact {} before Friday.",
    "{}",
    "From: {}\nSubject: invoice",
    "my details are {}, thanks!",
    "(see {})",
    '"{}" was entered twice',
    "reach me at {}.",
    "old={}; new=none",
    "Kontakt: {} / Büro",
    "call or write:{} ok?",
]
FILLER = [
    "The parcel arrived late and the box was open.",
    "Meeting moved to 14:30 on 2026-11-18.",
    "Version 10.4.2 fixes the bug from build 20261104.",
    "Total: 1,234.50 EUR for 12 items.",
    "Ping 192.168.10.25 took 12.5 ms.",
    "See section 4.2.1, page 117.",
    "",
]


def email(draw: random.Random) -> str:
    first = draw.choice(FIRST).replace("é", "e").replace("ö", "oe")
    last = draw.choice(LAST).replace("'", "")
    local = draw.choice(
        [f"{first}.{last}", f"{first}{draw.randint(1, 99)}", f"{first}+news", f"{first}_{last}"]
    )
    host = draw.choice([*HOSTS, f"{last}.{draw.choice(TLDS)}"])
    name = f"{local}@{host}"
    return name.upper() if draw.random() < 0.1 else name


def card(draw: random.Random) -> str:
    kind, length = draw.choice(
        [("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("62", 16)]
    )
    digits = kind + "".join(draw.choice("0123456789") for _ in range(length - len(kind) - 1))
    digits += check_digit(digits)
    if length == 15:
        return draw.choice([digits, f"{digits[:4]} {digits[4:10]} {digits[10:]}"])
    parts = [digits[at : at + 4] for at in range(0, 16, 4)]
    return draw.choice([digits, " ".join(parts), "-".join(parts)])


def check_digit(digits: str) -> str:
    """By its definition: double every second digit from the right, add up what is there."""
    total = 0
    for at, char in enumerate(reversed(digits)):
        value = int(char) * (2 if at % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def phone(draw: random.Random) -> str:
    def digits(count: int) -> str:
        return "".join(draw.choice("0123456789") for _ in range(count))

    low = draw.choice("23456789")
    return draw.choice(
        [
            f"+49 30 {digits(7)}",
            f"+49 (0)89 {digits(6)}",
            f"+44 20 7{digits(3)} {digits(4)}",
            f"+1 ({low}12) 5{digits(2)}-{digits(4)}",
            f"+1-{low}12-5{digits(2)}-{digits(4)}",
            f"({low}12) 5{digits(2)}-{digits(4)}",
            f"{low}12-5{digits(2)}-{digits(4)}",
            f"{low}12.5{digits(2)}.{digits(4)}",
            f"+33 1 {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
            f"01 {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
            f"0171 {digits(7)}",
            f"030/{digits(7)}",
            f"020 7{digits(3)} {digits(4)}",
            f"+90{draw.choice('5')}{digits(9)}",
            f"0049 30 {digits(6)}",
            f"+91 9{digits(4)} {digits(5)}",
            f"044 {digits(3)} {digits(2)} {digits(2)}",
            f"13{digits(1)} {digits(4)} {digits(4)}",
            f"({low}12) 5{digits(2)}-{digits(4)} ext. {digits(2)}",
        ]
    )


def decoy(draw: random.Random) -> str:
    def digits(count: int) -> str:
        return "".join(draw.choice("0123456789") for _ in range(count))

    low = draw.choice("12345")
    not_luhn = "4" + digits(14)
    wrong = str((int(check_digit(not_luhn)) + draw.randint(1, 9)) % 10)
    hexes = "".join(draw.choice("0123456789abcdef") for _ in range(32))
    return draw.choice(
        [
            f"{not_luhn}{wrong}",
            f"order 100{digits(7)}",
            f"2026-{draw.randint(10, 12)}-{draw.randint(10, 28)}",
            f"{draw.randint(10, 28)}.{draw.randint(10, 12)}.2026",
            f"2026-11-18T03:{draw.randint(10, 59)}:{draw.randint(10, 59)}.{digits(6)}Z",
            f"10.{draw.randint(0, 255)}.{draw.randint(0, 255)}.{draw.randint(1, 254)}",
            f"v{draw.randint(1, 9)}.{draw.randint(0, 30)}.{draw.randint(0, 400)}",
            f"{hexes[:8]}-{hexes[8:12]}-7{hexes[13:16]}-a{hexes[17:20]}-{hexes[20:32]}",
            f"sha256:{hexes}",
            f"DE89 3704 0044 0532 {digits(4)} 00",
            f"978-3-16-{digits(6)}-{draw.randint(0, 9)}",
            f"{draw.randint(1, 999)},{digits(3)},{digits(3)}.{digits(2)}",
            f"17{digits(11)}",
            f"@{draw.choice(FIRST[:2])}",
            f"user@localhost:{digits(4)}",
            f"ssh root@{draw.choice(FIRST[:2])}",
            f"{draw.randint(10, 80)}.{digits(6)}, {draw.randint(10, 80)}.{digits(6)}",
            f"{digits(3)} x {digits(3)} x {digits(3)}",
            "a=b@c",
            f"4{digits(12)}",
            f"35{digits(13)}",
            f"{low} {digits(3)} {digits(3)} {digits(4)} units",
            f"https://shop.example/item/{digits(10)}?v={digits(7)}",
            f"{digits(16)} bytes",
            f"{draw.randint(100, 999)}-{draw.randint(10, 99)}",
        ]
    )


MAKERS: dict[str, Callable[[random.Random], str]] = {"email": email, "card": card, "phone": phone}


def texts(count: int, seed: int = 20) -> list[Text]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        held: dict[str, list[str]] = {}
        decoys = []
        lines = []
        for _ in range(draw.choice([0, 0, 1, 1, 2, 3])):
            rule = draw.choice(list(MAKERS))
            found = MAKERS[rule](draw)
            held.setdefault(rule, []).append(found)
            lines.append(draw.choice(FRAMES).format(found))
        for _ in range(draw.choice([0, 1, 1, 2])):
            found = decoy(draw)
            decoys.append(found)
            lines.append(draw.choice(FRAMES).format(found))
        lines += [draw.choice(FILLER) for _ in range(2)]
        draw.shuffle(lines)
        made.append(Text("\n".join(lines), held, decoys))
    return made
