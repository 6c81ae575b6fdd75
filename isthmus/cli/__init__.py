"""The door: one verb per function; the only place that prints."""
