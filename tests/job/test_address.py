"""Addresses as the job file writes them."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import FieldError
from isthmus.job import Address
from isthmus.job.fields import format_proxy, parse_address, parse_proxy, parse_public_address

hosts = st.ip_addresses().map(str).filter(
    lambda host: not ipaddress.ip_address(host).is_unspecified
) | st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8})?", fullmatch=True)
addresses = st.builds(Address, host=hosts, port=st.integers(min_value=1, max_value=65535))


@settings(deadline=None)
@given(addresses)
def test_text_round_trips(address: Address) -> None:
    assert parse_address(str(address)) == address
    assert parse_public_address(str(address)) == address
    assert parse_proxy(format_proxy(address)) == address


def test_ipv6_is_in_brackets() -> None:
    address = Address(host="2001:db8::7", port=7600)
    assert str(address) == "[2001:db8::7]:7600"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":7600",
        "host:0",
        "host:65536",
        "ho st:1",
        "[::1:1",
        "[x]:1",
        "::1:7600",
        "-a:1",
    ],
)
def test_what_is_no_address_is_refused_with_a_cure(text: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_address(text)
    assert repr(text) in caught.value.what
    assert caught.value.cure


@pytest.mark.parametrize("text", ["0.0.0.0:7600", "[::]:7600"])
def test_an_address_for_all_interfaces_cannot_be_dialled(text: str) -> None:
    parse_address(text)
    with pytest.raises(FieldError, match="other clouds cannot dial"):
        parse_public_address(text)


@pytest.mark.parametrize("text", ["10.0.0.1:3128", "https://proxy:3128", "http://user:secret@proxy:3128"])
def test_what_is_no_http_proxy_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        parse_proxy(text)
