"""The pipelines of an application's events: episodes, rhythms, outcomes, transitions."""
