"""Network addresses as the job file writes them: "host:port", an IPv6 host in brackets."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from isthmus.job.findings import FieldError

_HOST_AND_PORT: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]+)")
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_MAX_PORT: Final = 65535
_PROXY_SCHEME: Final = "http://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host (a DNS name, or an IP address without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address that "host:port" or "[IPv6]:port" names."""
    found = _HOST_AND_PORT.fullmatch(text)
    if found is None:
        raise FieldError(f"{text!r} is no address", cure=_address_cure(text))
    port = int(found["port"])
    if not 1 <= port <= _MAX_PORT:
        raise FieldError(f"{text!r} has port {port}", cure=f"choose a port from 1 to {_MAX_PORT}")
    host = found["host"] if found["ipv6"] is None else found["ipv6"]
    if not (_is_ipv6(host) if found["ipv6"] is not None else _is_host(host)):
        raise FieldError(
            f"{text!r} has no valid host", cure='write "host:port", such as "east.example.com:7600"'
        )
    return Address(host=host, port=port)


def parse_public_address(text: str) -> Address:
    """Return an address that other clouds can dial."""
    address = parse_address(text)
    if address.host in ("0.0.0.0", "::"):  # noqa: S104 this refuses it
        raise FieldError(
            f"other clouds cannot dial {address.host!r}",
            cure="give the host under which they reach this cloud",
        )
    return address


def parse_proxy(text: str) -> Address:
    """Return the address of the HTTP CONNECT proxy that "http://host:port" names."""
    if not text.startswith(_PROXY_SCHEME):
        raise FieldError(f"{text!r} is no HTTP proxy", cure='write "http://host:port"')
    return parse_address(text.removeprefix(_PROXY_SCHEME).removesuffix("/"))


def format_proxy(address: Address) -> str:
    """Return the proxy's address as the job file writes it."""
    return f"{_PROXY_SCHEME}{address}"


def _address_cure(text: str) -> str:
    if _is_ipv6(text.strip("[]")):
        return f'add a port: "[{text.strip("[]")}]:7600"'
    if ":" not in text and _is_host(text):
        return f'add a port: "{text}:7600"'
    return 'write "host:port", an IPv6 host in brackets: "[2001:db8::7]:7600"'


def _is_host(text: str) -> bool:
    if re.fullmatch(r"[0-9.]+", text):
        return _is_ip(text, ipaddress.IPv4Address)
    return _HOST.fullmatch(text) is not None and len(text) <= 253


def _is_ipv6(text: str) -> bool:
    return _is_ip(text, ipaddress.IPv6Address)


def _is_ip(text: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
