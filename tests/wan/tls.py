"""TLS contexts of Python for identities, as other programs would make them."""

import ssl
import tempfile
from pathlib import Path

from isthmus.wan.certificates import Identity


def server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, identity)


def client_context(identity: Identity) -> ssl.SSLContext:
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)


def _load(context: ssl.SSLContext, identity: Identity) -> ssl.SSLContext:
    context.load_verify_locations(cadata=identity.authority_pem.decode())
    with tempfile.TemporaryDirectory() as folder:
        chain = Path(folder, "chain.pem")
        chain.write_bytes(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(chain)
    return context
