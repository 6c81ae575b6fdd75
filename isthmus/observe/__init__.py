"""Reads what a run did from its events, compares it with the plan, and draws both."""
