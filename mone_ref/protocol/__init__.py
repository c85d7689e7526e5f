"""The plug-in surface as JSON lines, for engines in a process of their own (docs/protocol.md)."""

VERSION = 1
"""Spoken by this release; an engine of another version is told so at the handshake."""

READ_FD = "MONE_REF_READ_FD"
WRITE_FD = "MONE_REF_WRITE_FD"
"""Environment variables of an engine: the descriptors of its requests and of its answers."""
