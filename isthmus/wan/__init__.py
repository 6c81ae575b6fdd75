"""Bytes between clouds: links, gateway, emulator, certificates, probe."""

from isthmus.plan.types import Priority
from isthmus.wan.frames import Packet
from isthmus.wan.link import Link, LinkSettings
from isthmus.wan.memory import MemoryLink
from isthmus.wan.relays.shaping import Shape

__all__ = ["Link", "LinkSettings", "MemoryLink", "Packet", "Priority", "Shape"]
