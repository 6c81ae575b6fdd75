"""Cures as users read them, made into changes of a job, so that tests can follow them to the letter."""

import re

from tests.plan.jobs import link

_SETTING = re.compile(r'set ([a-z_.]+) to "?([^",]+)"?')
_DEVICES = re.compile(r"devices of ([\d.]+ [KMGT]iB) in '(\w+)'")
_LINK = re.compile(r'add a \[\[link\]\] with between = \["(\w+)", "(\w+)"\]')


def ways(hint: str | None) -> list[str]:
    """The ways out that a hint names."""
    return (hint or "").split("; or ")


def overrides(way: str) -> list[str]:
    """What is to be set for one of them."""
    settings = [f"{key}={value}" for key, value in _SETTING.findall(way)]
    return settings + [f"cloud.{cloud}.memory={size}" for size, cloud in _DEVICES.findall(way)]


def tables(way: str) -> str:
    """What is to be added for it."""
    return "".join(link(first, second) for first, second in _LINK.findall(way))
