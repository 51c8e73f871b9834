"""Standards for secrecy and evidence, as pure functions and small files: JWE payloads (RFC 7516),
key rings of JWK sets (RFC 7517), Merkle trees (RFC 6962), signed notes and checkpoints (C2SP).

It lies below the stores, so that whatever reads files without a bus can open and check them.
"""
