"""``format("trunkline")`` for reading: options, offsets, the plan of tasks, and the scan."""
