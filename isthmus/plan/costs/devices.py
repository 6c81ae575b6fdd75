"""The catalogue of accelerators: what one rank of a cloud can compute, hold and cost.

Speeds are peaks of dense arithmetic from the makers' data sheets; `achievable` is the share of it that whole
layers of a transformer reach in training, as published runs report it. Prices are round on-demand figures of
public clouds and markets, there to be replaced: by `usd_per_hour` of a cloud or an `[[accelerator]]` table.
What launches cost is the host's: about 0.8 ms for the forward pass of a layer that runs eagerly, as measured
beside an H200, and a quarter of it where layers are compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from isthmus.errors import UserError
from isthmus.job.sections import plain_name
from isthmus.plan.costs import Precision
from isthmus.units import closest

_TERA: Final = 1e12
_GIGA: Final = 1e9
_GIB: Final = 2**30

DEFAULT_ACHIEVABLE: Final = 0.4
"""Of an accelerator that says nothing of it."""
DEFAULT_FLOAT32_SHARE: Final = 1 / 16
"""Peak in float32 to that in bfloat16, likewise: about what data-centre GPUs since 2020 have."""
DEFAULT_MEMORY_BANDWIDTH: Final = 1555 * _GIGA
"""Bytes per second, likewise: an A100's."""
LAYER_LAUNCH_S: Final = 8e-4
"""What the host takes to launch the forward pass of one layer, eagerly."""
_COMPILED_SHARE: Final = 0.25
# Calls of a layer's forward on one core, beside its arithmetic.
_CPU_LAYER_S: Final = 4e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device as torch sees it; speeds in operations and bytes per second."""

    name: str
    flops: float
    """Peak in bfloat16; as in float32 where there are no units for it."""
    flops_float32: float
    achievable: float
    achievable_float32: float = 0.7
    """Plain arithmetic comes nearer to its peak than matrix units do."""
    memory_bytes: int
    memory_bandwidth: float
    usd_per_hour: float | None
    is_cpu: bool = False
    eager_launch_s: float = LAYER_LAUNCH_S
    """What it takes to call or to launch the forward pass of one layer that is not compiled."""

    def layer_launch_s(self, *, is_compiled: bool) -> float:
        """What it takes to launch the forward pass of one layer."""
        return self.eager_launch_s * (_COMPILED_SHARE if is_compiled else 1.0)

    def shared_by(self, num_ranks: int) -> "Accelerator":
        """What one of several ranks has that compute on the same device at the same time."""
        if num_ranks == 1:
            return self
        price = self.usd_per_hour
        return replace(
            self,
            flops=self.flops / num_ranks,
            flops_float32=self.flops_float32 / num_ranks,
            memory_bytes=self.memory_bytes // num_ranks,
            memory_bandwidth=self.memory_bandwidth / num_ranks,
            usd_per_hour=None if price is None else price / num_ranks,
        )

    def effective_flops(self, precision: Precision) -> float:
        """What training reaches."""
        if precision is Precision.FLOAT32:
            return self.flops_float32 * self.achievable_float32
        # Without units for bfloat16 its products run as float32's do.
        share = self.achievable if self.flops > self.flops_float32 else self.achievable_float32
        return self.flops * share


def new_accelerator(
    name: str,
    *,
    flops: float,
    memory_bytes: int,
    flops_float32: float | None = None,
    achievable: float | None = None,
    memory_bandwidth: float | None = None,
    usd_per_hour: float | None = None,
) -> Accelerator:
    """An accelerator of the user's own, with the usual for what is left out."""
    return Accelerator(
        name=name,
        flops=flops,
        flops_float32=flops * DEFAULT_FLOAT32_SHARE if flops_float32 is None else flops_float32,
        achievable=DEFAULT_ACHIEVABLE if achievable is None else achievable,
        memory_bytes=memory_bytes,
        memory_bandwidth=DEFAULT_MEMORY_BANDWIDTH if memory_bandwidth is None else memory_bandwidth,
        usd_per_hour=usd_per_hour,
    )


def find_accelerator(name: str, *, own: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The accelerator of that name: the job's own, else the catalogue's; case and punctuation aside.

    Of several that are spelled alike, the one of exactly that name.
    """
    for some in (own or {}, CATALOGUE):
        by_plain = {plain_name(key): one for key, one in some.items()}
        found = some.get(name) or by_plain.get(plain_name(name))
        if found is not None:
            return found
    known = {**CATALOGUE, **(own or {})}
    meant = closest(name, known)
    guess = f"did you mean {meant!r}? If not, " if meant else ""
    raise UserError(
        f"accelerator {name!r} is not in the catalogue",
        hint=f"{guess}add it to the job: [[accelerator]] with name = {name!r}, flops and memory"
        + ("" if meant else f"; known are {', '.join(known)}"),
    )


def _catalogue() -> tuple[Accelerator, ...]:
    # In the order: bfloat16, float32, achievable, GiB, GB/s, $/h.
    return (
        # NVIDIA Tesla V100 data sheet (2020), SXM2; it has no units for bfloat16 (its 125 are float16).
        _row("v100-16gb", 15.7, 15.7, 0.7, 16, 900, 2.5),
        _row("v100-32gb", 15.7, 15.7, 0.7, 32, 900, 3.0),
        # NVIDIA A100 data sheet (2021), SXM.
        _row("a100-40gb", 312, 19.5, 0.5, 40, 1555, 3.0),
        _row("a100-80gb", 312, 19.5, 0.5, 80, 2039, 4.0),
        # NVIDIA H100 data sheet (2023), SXM; half of the figures "with sparsity".
        _row("h100", 989, 67, 0.4, 80, 3350, 4.0),
        # NVIDIA H200 data sheet (2024), SXM; torch sees 139.8 GiB of the 141 GB and what it reserves.
        _row("h200", 989, 67, 0.4, 139.8, 4800, 5.0),
        # NVIDIA DGX B200 data sheet (2024), one eighth.
        _row("b200", 2250, 75, 0.4, 180, 7700, 8.0),
        # NVIDIA L4 data sheet (2023), dense.
        _row("l4", 121, 30.3, 0.4, 24, 300, 0.8),
        # NVIDIA L40S data sheet (2023), dense.
        _row("l40s", 362, 91.6, 0.4, 48, 864, 1.9),
        # NVIDIA A10G as in AWS's G5 instances, AWS (2021) and NVIDIA A10 data sheet.
        _row("a10g", 70, 31.2, 0.5, 24, 600, 1.0),
        # NVIDIA T4 data sheet (2019); no units for bfloat16 (its 65 are float16).
        _row("t4", 8.1, 8.1, 0.7, 16, 320, 0.5),
        # NVIDIA Ada architecture white paper (2022), products added up in float32.
        _row("rtx4090", 165, 82.6, 0.5, 24, 1008, 0.5),
        # AMD Instinct MI250X data sheet (2021); torch sees each of its two dies as a device.
        _row("mi250x", 191.5, 23.9, 0.4, 64, 1638, 1.5),
        # AMD Instinct MI300X data sheet (2023), dense.
        _row("mi300x", 1307, 163.4, 0.35, 192, 5300, 4.0),
        # Huawei publishes no data sheet of the 910B; its B2 variant as third parties report it.
        _row("ascend-910b", 376, 94, 0.4, 64, 1600, 2.0),
    )


def _row(
    name: str,
    tflops: float,
    tflops_float32: float,
    achievable: float,
    memory_gib: float,
    memory_gb_per_s: float,
    usd_per_hour: float,
) -> Accelerator:
    return Accelerator(
        name=name,
        flops=tflops * _TERA,
        flops_float32=tflops_float32 * _TERA,
        achievable=achievable,
        memory_bytes=round(memory_gib * _GIB),
        memory_bandwidth=memory_gb_per_s * _GIGA,
        usd_per_hour=usd_per_hour,
    )


# Two cores with AVX-512 at 2.8 GHz, as a rank on a small machine has. One such core (Xeon, Ice Lake, torch
# 2.13) gave 48 to 125 GFLOP/s in forward and backward of Llama layers 128 to 2048 wide in float32, of a peak
# of 179, and 18 to 32 in bfloat16, which it has no units for: a third of the peak is the middle of that.
_CPU: Final = Accelerator(
    name="cpu",
    flops=0.11 * _TERA,
    flops_float32=0.36 * _TERA,
    achievable=0.35,
    achievable_float32=0.35,
    memory_bytes=64 * _GIB,
    memory_bandwidth=25 * _GIGA,
    usd_per_hour=0.1,
    is_cpu=True,
    eager_launch_s=_CPU_LAYER_S,
)

CATALOGUE: Final[Mapping[str, Accelerator]] = MappingProxyType(
    {one.name: one for one in (*_catalogue(), _CPU)}
)
