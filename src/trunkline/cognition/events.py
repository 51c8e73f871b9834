"""Cognitive events: their types, and the topic of each in the wiring map."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class CognitiveType(StrEnum):
    WORKSPACE_BROADCAST = "WORKSPACE_BROADCAST"
    HIPPO_ENCODE = "HIPPO_ENCODE"
    AFFECT_ANNOTATED = "AFFECT_ANNOTATED"
    METACOG_REPORT = "METACOG_REPORT"
    CORTEX_PREDICTION = "CORTEX_PREDICTION"
    ACTION_DECISION = "ACTION_DECISION"
    ACTION_EXECUTED = "ACTION_EXECUTED"
    PROSPECTIVE_TRIGGER = "PROSPECTIVE_TRIGGER"
    WRITE_ACCEPTED = "WRITE_ACCEPTED"
    TRIGGER_FIRED = "TRIGGER_FIRED"
    ATTENTION_REQUEST = "ATTENTION_REQUEST"
    WORKING_MEMORY_UPDATE = "WORKING_MEMORY_UPDATE"
    GLOBAL_WORKSPACE_BROADCAST = "GLOBAL_WORKSPACE_BROADCAST"
    COGNITIVE_LOAD_ALERT = "COGNITIVE_LOAD_ALERT"
    FOCUS_SHIFT_REQUEST = "FOCUS_SHIFT_REQUEST"


TOPIC: Final[dict[CognitiveType, str]] = {
    CognitiveType.WORKSPACE_BROADCAST: "workspace",
    CognitiveType.GLOBAL_WORKSPACE_BROADCAST: "workspace",
    CognitiveType.WORKING_MEMORY_UPDATE: "workspace",
    CognitiveType.ATTENTION_REQUEST: "workspace",
    CognitiveType.FOCUS_SHIFT_REQUEST: "workspace",
    CognitiveType.COGNITIVE_LOAD_ALERT: "workspace",
    CognitiveType.METACOG_REPORT: "workspace",
    CognitiveType.HIPPO_ENCODE: "hippo",
    CognitiveType.WRITE_ACCEPTED: "temporal",
    CognitiveType.AFFECT_ANNOTATED: "affect",
    CognitiveType.CORTEX_PREDICTION: "cortex",
    CognitiveType.ACTION_DECISION: "actions",
    CognitiveType.ACTION_EXECUTED: "actions",
    CognitiveType.PROSPECTIVE_TRIGGER: "prospective",
    CognitiveType.TRIGGER_FIRED: "prospective",
}
