"""The types of cognitive events."""

from __future__ import annotations

from trunkline.cognition.events import TOPIC as TOPICS
from trunkline.cognition.events import CognitiveType as CognitiveEventType

ATTENTION_REQUEST = CognitiveEventType.ATTENTION_REQUEST
WORKING_MEMORY_UPDATE = CognitiveEventType.WORKING_MEMORY_UPDATE
GLOBAL_WORKSPACE_BROADCAST = CognitiveEventType.GLOBAL_WORKSPACE_BROADCAST
COGNITIVE_LOAD_ALERT = CognitiveEventType.COGNITIVE_LOAD_ALERT
FOCUS_SHIFT_REQUEST = CognitiveEventType.FOCUS_SHIFT_REQUEST

__all__ = [
    "ATTENTION_REQUEST",
    "COGNITIVE_LOAD_ALERT",
    "FOCUS_SHIFT_REQUEST",
    "GLOBAL_WORKSPACE_BROADCAST",
    "TOPICS",
    "WORKING_MEMORY_UPDATE",
    "CognitiveEventType",
]
