"""``format("trunkline")`` for writing: rows become records of a topic, each once."""
