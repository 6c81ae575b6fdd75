"""Bytes between clouds: links, gateway, emulator, certificates, probe."""

from isthmus.wan.link import Link, LinkSettings
from isthmus.wan.memory import MemoryLink
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet
from isthmus.wan.relays.shaping import Shape

__all__ = ["Link", "LinkSettings", "MemoryLink", "Packet", "Priority", "Shape"]
