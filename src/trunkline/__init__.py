"""One durable event bus: a log of records, and a cursor per group."""
