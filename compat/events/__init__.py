"""The names that programs written for ``events`` import, on top of Trunkline."""
