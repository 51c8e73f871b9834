"""A small shop: a web application, its database, and two kinds of worker processes."""
