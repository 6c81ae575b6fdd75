"""A digest of exported weights that knows nothing of how they are spread over files."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import deserialize


def read_digests(folder: Path) -> dict[str, str]:
    """The digest of each tensor below a folder, by `file/name`; shards of one model count as one file."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        for name, tensor in deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            key = common_name(stem, name)
            if key is not None:
                found[key] = digest_of(key, tensor["dtype"], tensor["shape"], tensor["data"])
    return found


def common_name(stem: str, name: str) -> str | None:
    """The name of a tensor in any edition's export; None for what only one of them has.

    A model with bottlenecks was exported with a file for each of them; now it is a model of its own, whose
    anchors are folded into a bias and a table. The model's own weights and the projections are comparable.
    """
    half = re.fullmatch(r"(?:boundaries\.\d+\.)?(down|up)\.weight", name)
    if stem.startswith("boundary-") or name.startswith("boundaries."):
        return f"boundary/{half[1]}" if half is not None else None
    return f"{stem}/{name.removeprefix('inner.')}"


def digest_of(name: str, dtype: str, shape: list[int], data: bytes) -> str:
    """The SHA-256 of one tensor: its name, its type, its shape and its bytes."""
    about = f"{name}\0{dtype}\0{'×'.join(map(str, shape))}\0"
    return hashlib.sha256(about.encode() + data).hexdigest()


def whole_digest(digests: Mapping[str, str]) -> str:
    """The SHA-256 of all tensors in the order of their names."""
    lines = [f"{name} {digests[name]}\n" for name in sorted(digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def describe_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """One line on what differs; empty if nothing does."""
    both = sorted(old.keys() & new.keys())
    differing = [name for name in both if old[name] != new[name]]
    parts = []
    if differing:
        parts.append(f"{len(differing)} of {len(both)} tensors differ, the first is {differing[0]}")
    for names, side in ((old.keys() - new.keys(), "old"), (new.keys() - old.keys(), "new")):
        if names:
            parts.append(f"{len(names)} only in {side}, such as {min(names)}")
    return "; ".join(parts)
