"""What bounds a plan: time, money, memory and quality; and accelerators that the catalogue does not have."""

from typing import Literal

from pydantic import Field

from isthmus.job.fields import Deadline, Flops, Frozen, Memory, MemoryBandwidth, Price


class LimitsSpec(Frozen):
    """What the planner must keep to."""

    deadline_s: Deadline | None = Field(
        default=None, alias="deadline", description="the most that the whole run may take", examples=["3 d"]
    )
    budget_usd: float | None = Field(
        default=None, gt=0, description="the most that the whole run may cost", examples=[500.0]
    )
    codec_loss: Literal["none", "slight", "some"] = Field(
        default="slight",
        description="the quality that codecs and rare synchronisation may cost",
        examples=["none"],
    )
    memory_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a device's memory that a plan may fill",
        examples=[0.9],
    )

    @property
    def counts_money(self) -> bool:
        """Whether a plan is to save money: within a budget, or wherever a deadline leaves time for it."""
        return self.budget_usd is not None or self.deadline_s is not None


class AcceleratorSpec(Frozen):
    """One kind of device: a new entry of the catalogue, or one that replaces the catalogue's own."""

    name: str = Field(min_length=1, description="what `cloud.accelerator` calls it", examples=["h100"])
    flops: Flops = Field(description="peak computing speed in bfloat16", examples=["989 TFLOPS"])
    flops_float32: Flops | None = Field(
        default=None,
        description="peak computing speed in float32; a sixteenth of `flops` unless given",
        examples=["67 TFLOPS"],
    )
    achievable: float = Field(
        default=0.4, gt=0, le=1, description="share of the peak that training reaches", examples=[0.4]
    )
    memory_bytes: Memory = Field(alias="memory", description="memory of one device", examples=["80 GiB"])
    memory_bandwidth_bytes_per_s: MemoryBandwidth | None = Field(
        default=None,
        alias="memory_bandwidth",
        description="speed of that memory; as an A100's unless given",
        examples=["3.35 TB/s"],
    )
    usd_per_hour: Price | None = Field(default=None, description="price of one device", examples=[2.5])
