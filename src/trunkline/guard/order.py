"""The order of guards, checked when they are given to a bus.

A guard has a ``stage``. A guard that must not stand inside of another has ``placed``, which asks
``check_order``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from trunkline.errors import InvalidOption, Reject

Stage = Literal["redact", "decide", "seal", "look", "keep"]

# The outer guard, the inner one, and what would happen.
_WRONG: Final = {
    ("seal", "redact"): "redaction behind a vault sees sealed payloads",
    (
        "decide",
        "redact",
    ): "redaction behind a policy raises bands the policy was not asked for",
    ("look", "seal"): "a quarantine before a vault sees sealed payloads",
    ("keep", "seal"): "a gate before a vault keeps dropped events in plain text",
}
_HINT: Final = "in this order: redaction, policy, vault, then quarantine, gate and notary"


class GuardReject(Reject):
    """A guard's refusal of a delivery. Its reason quotes no payload, so a vault lets it pass."""


def check_order(stage: Stage, outer: Sequence[object]) -> None:
    """``InvalidOption`` if a guard of this stage must not stand inside of one of these."""
    for one in outer:
        if said := _WRONG.get((getattr(one, "stage", ""), stage)):
            raise InvalidOption(f"wrong order: {said}", name="middleware", hint=_HINT)
