"""What is measured before anything is predicted: the links, the passes of each stage, making its packets.

Files, one for each cloud of each case or WAN, are all that the predictions see:

    probe-<WAN>-<cloud>.json     the link to the next cloud, as `isthmus probe` measures it
    profile-<case>-<cloud>.json  passes and update of the stage, as the file of `isthmus profile`
    beside-<case>-<cloud>.json   its parameters, what packets weigh, and the time to make and to read them
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from isthmus.plan.times import NO_TIME, PassTimes, Profile, Sample, write_profile
from isthmus.train.device import Device
from isthmus.train.profiling import Rig
from isthmus.wan.probe import probe_cloud
from predicted.cases import Case
from predicted.journey import Visit
from predicted.packets import Packets, weigh_packets

PROBE_S: Final = 0.5
PROFILE_S: Final = 0.6
_NUM_WARM_UPS: Final = 3
# An accelerator that was idle while links were probed takes a while to its full clock.
_NUM_DEVICE_WARM_UPS: Final = 20
_LEAST_ROUNDS: Final = 5
_NUM_UPDATES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What is known of a stage beside its profile."""

    num_parameters: int
    packets: Packets

    @classmethod
    def read(cls, path: Path) -> "Beside":
        """From its file."""
        values = json.loads(path.read_text())
        return cls(num_parameters=values["num_parameters"], packets=Packets(**values["packets"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Where the files are."""

    path: Path

    def probe(self, case: Case, cloud: str) -> Path:
        """The link from a cloud to the next, in the WAN of a case."""
        lines = "-".join(
            f"{1e3 * one.rtt_s:g}ms{one.down_bps / 1e6:g}and{one.up_bps / 1e6:g}Mbps"
            for one in case.wan.lines
        )
        return self.path / f"probe-{lines}-{cloud}.json"

    def profile(self, case: Case, cloud: str) -> Path:
        """One stage of a case."""
        return self.path / f"profile-{case.number:02}-{cloud}.json"

    def beside(self, case: Case, cloud: str) -> Path:
        """What else is known of it."""
        return self.path / f"beside-{case.number:02}-{cloud}.json"


def measure(visit: Visit, *, folder: Folder) -> None:
    """Probe all links, then profile the stages of all cases, at all clouds at the same time."""
    cloud = visit.cloud
    visit.report(f"{cloud}: probing {visit.cases[0].wan.name}")
    found = probe_cloud(visit.job, visit.endpoint, cloud=cloud, report=lambda _: None, duration_s=PROBE_S)
    # Both ends of a link come to the same figures.
    for one in found:
        if one.between[0] == cloud:
            folder.probe(visit.cases[0], cloud).write_text(json.dumps(asdict(one)))
    visit.meet()
    for case in visit.cases:
        stage = visit.stage(case)
        visit.report(f"{cloud}: profile of case {case.number}")
        folder.profile(case, cloud).write_text(write_profile(_profile(case, stage, visit)))
        beside = Beside(num_parameters=_num_parameters(stage), packets=_packets(case, stage, visit))
        folder.beside(case, cloud).write_text(json.dumps(asdict(beside)))
    visit.meet()


def _profile(case: Case, stage: Any, visit: Visit) -> Profile:
    """Of the same stages once."""
    profiles = visit.known.profiles
    if case.stages not in profiles:
        profiles[case.stages] = profile_stage(case, stage, visit.meet)
    return profiles[case.stages]


def _packets(case: Case, stage: Any, visit: Visit) -> Packets:
    """Of the same stages with the same codec once."""
    packets, key = visit.known.packets, (case.stages, case.codec)
    if key not in packets:
        packets[key] = weigh_packets(case, stage.model.config.hidden_size)
    return packets[key]


def profile_stage(case: Case, stage: Any, meet: Callable[[], object]) -> Profile:
    """Passes through the product's rig, while the other clouds do the same."""
    device = Device(case.stages.device)
    rig = Rig(stage, device=device, size=case.stages.size)
    for _ in range(_NUM_DEVICE_WARM_UPS if device.is_accelerator else _NUM_WARM_UPS):
        _passes(rig, device)
        rig.update()
    meet()
    taken: list[tuple[float, float]] = []
    started_s = time.monotonic()
    while time.monotonic() - started_s < PROFILE_S or len(taken) < _LEAST_ROUNDS:
        taken.append(_passes(rig, device))
    meet()
    forward_s, backward_s = map(statistics.median, zip(*taken, strict=True))
    update_s = statistics.median(_update(rig, device) for _ in range(_NUM_UPDATES))
    sample = Sample(
        num_sequences=case.stages.size.num_sequences,
        sequence_length=case.stages.size.sequence_length,
        precision=case.stages.size.precision,
        embedding=NO_TIME,
        layers=(PassTimes(forward_s=forward_s, backward_s=backward_s),),
        head=NO_TIME,
    )
    return Profile(
        device=str(device.torch_device),
        model_type=type(stage).__name__,
        samples=(sample,),
        update_s_per_parameter=update_s / _num_parameters(stage),
    )


def _passes(rig: Rig, device: Device) -> tuple[float, float]:
    return _timed(device, lambda: rig.forward(0)), _timed(device, lambda: rig.backward(0))


def _update(rig: Rig, device: Device) -> float:
    _passes(rig, device)
    return _timed(device, rig.update)


def _timed(device: Device, work: Callable[[], object]) -> float:
    device.mark().wait()
    started_s = time.perf_counter()
    work()
    device.mark().wait()
    return time.perf_counter() - started_s


def _num_parameters(stage: Any) -> int:
    return sum(one.numel() for one in stage.model.parameters())
