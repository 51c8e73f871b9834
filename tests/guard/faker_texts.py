"""Texts out of Faker, which knows nothing of our rules: its phone numbers, cards and addresses of
many countries, in its own sentences, between its own numbers of other kinds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from faker import Faker

from .texts import Text

LOCALES = [
    *("en_US", "en_GB", "en_AU", "en_CA", "en_IN", "de_DE", "de_AT", "de_CH", "fr_FR", "fr_CH"),
    *("it_IT", "es_ES", "es_MX", "pt_BR", "pt_PT", "nl_NL", "pl_PL", "sv_SE", "no_NO", "da_DK"),
    *("fi_FI", "cs_CZ", "hu_HU", "tr_TR", "ru_RU", "uk_UA", "el_GR", "ja_JP", "ko_KR", "zh_CN"),
]
OTHERS = [
    *("isbn13", "isbn10", "ean13", "ean8", "iban", "uuid4", "ipv4", "ipv6", "mac_address", "date"),
    *("iso8601", "time", "postcode", "pricetag", "license_plate", "md5", "user_agent", "file_path"),
    *("url", "swift", "unix_time", "hex_color", "building_number", "coordinate", "street_address"),
    *("company", "name", "job", "year", "user_name", "image_url", "date_time", "pydecimal"),
]


def phone(fake: Any, draw: random.Random) -> str:
    return str(fake.phone_number())


def card(fake: Any, draw: random.Random) -> str:
    """As it is, or as it is printed on a card."""
    digits = str(fake.credit_card_number())
    if len(digits) != 16 or draw.random() < 0.4:
        return digits
    between = draw.choice([" ", "-", "\u00a0", "\u202f", "\u2011"])
    return between.join(digits[at : at + 4] for at in range(0, 16, 4))


def email(fake: Any, draw: random.Random) -> str:
    name = draw.choice(["email", "ascii_email", "company_email", "free_email", "safe_email"])
    found = str(getattr(fake, name)())
    local, _, host = found.partition("@")
    if draw.random() < 0.2:
        found = f"{local}+{fake.word()}@{host}"
    if draw.random() < 0.1:
        found = f"{local}@{draw.choice(['müller', 'españa', 'пример', '例え'])}.{host}"
    return found


MAKERS: dict[str, Callable[[Any, random.Random], str]] = {
    "email": email,
    "card": card,
    "phone": phone,
}


def texts(count: int, seed: int = 7) -> list[tuple[str, Text]]:
    """``(locale, text)``."""
    draw = random.Random(seed)
    fakes = {name: Faker(name) for name in LOCALES}
    for number, fake in enumerate(fakes.values()):
        fake.seed_instance(seed + number)
    made = []
    for number in range(count):
        locale = LOCALES[number % len(LOCALES)]
        fake = fakes[locale]
        held: dict[str, list[str]] = {}
        decoys: list[str] = []
        words: list[str] = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            rule = draw.choice(list(MAKERS))
            found = MAKERS[rule](fake, draw)
            held.setdefault(rule, []).append(found)
            words.append(found)
        for _ in range(draw.choice([1, 2, 3])):
            kind = draw.choice(OTHERS)
            decoy = str(getattr(fake, kind, fake.word)())
            decoys.append(decoy)
            words.append(decoy)
        draw.shuffle(words)
        parts = [str(fake.sentence()) if draw.random() < 0.8 else str(fake.text(80))]
        for word in words:
            parts.append(
                draw.choice(["{}", "{},", "{}.", "({})", "{};", ": {}", '"{}"']).format(word)
            )
            parts.append(" ".join(fake.words(draw.randint(1, 5))))
        made.append((locale, Text(draw.choice([" ", " ", "\n"]).join(parts), held, decoys)))
    return made
