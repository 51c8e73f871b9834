"""The pipelines of any bus. One file holds one pipeline."""
