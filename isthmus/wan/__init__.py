"""Bytes between clouds: links, gateway, emulator, certificates, probe."""
