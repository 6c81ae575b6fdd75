"""Bytes forwarded by server name: the gateway, and the same relay, with shaping and faults, as emulator."""
