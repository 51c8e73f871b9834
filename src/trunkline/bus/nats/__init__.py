"""The bus on NATS JetStream."""

from __future__ import annotations

from trunkline.bus.nats.bus import FEATURES, NatsBus

__all__ = ["FEATURES", "NatsBus"]
