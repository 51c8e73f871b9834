"""The network door: a WebSocket and an HTTP API on one port, over any bus in this process."""
