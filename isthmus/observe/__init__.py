"""Seeing it: what a run did, from its events."""
