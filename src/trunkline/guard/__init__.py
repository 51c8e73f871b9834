"""Privacy and security around a bus, as middleware and as tools over its files.

``limits`` spaces, bands and capabilities · ``redaction`` personal data out of events before they
are encoded · ``safety`` quarantine before a handler · ``policy`` the rights of each actor.
The bus knows none of them: each is given to ``connect(url, middleware=[...])``.
"""
