"""Bytes between clouds: links, gateway, emulator, certificates, probe."""

from isthmus.plan.types import Priority
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from isthmus.wan.shaping import Shape

__all__ = ["Link", "LinkSettings", "MemoryLink", "Packet", "Priority", "Shape"]
