"""The benchmark: every promise about speed, measured beside the peer it is a promise about."""
