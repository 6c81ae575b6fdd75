"""Whether this machine has the devices that a cloud is to compute on."""

from dataclasses import dataclass

from isthmus.errors import UserError
from isthmus.job import CloudSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What torch finds on this machine: a kind of accelerator and how many, or why it cannot tell."""

    kind: str | None = None
    num_devices: int = 0
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.num_devices} × {self.kind}" if self.num_devices else "cpu only"


def require_kind(cloud: CloudSpec, found: Devices) -> None:
    """Refuse a cloud whose `device` is not here."""
    if cloud.device == "cpu":
        return
    if found.problem is not None:
        raise UserError(
            f"cloud {cloud.name!r} cannot use torch here: {found.problem}",
            hint="install torch for this machine anew",
        )
    if cloud.device not in ("auto", found.kind):
        raise UserError(
            f"cloud {cloud.name!r} asks for {cloud.device}, but torch finds {found} here",
            hint=f'set cloud.{cloud.name}.device to "{found.kind or "cpu"}" or "auto", '
            f"or install the driver and the torch build for {cloud.device}",
        )


def require_one_each(cloud: CloudSpec, found: Devices, *, num_ranks: int) -> None:
    """Refuse more ranks of a cloud on this machine than there are accelerators: each needs its own."""
    if cloud.device == "cpu" or not 0 < found.num_devices < num_ranks:
        return
    raise UserError(
        f"{num_ranks} ranks of cloud {cloud.name!r} here need a device each, but torch finds {found}",
        hint=f"start at most {found.num_devices} on this machine, or set cloud.{cloud.name}.ranks "
        f'to {found.num_devices} or its device to "cpu"',
    )
