"""Kernels make and read the bytes of the coders in torch (noise apart), and are chosen where they can be."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.codec import CodecEnd, Codecs
from isthmus.codec.base import Coder, CoderSite, Memory
from isthmus.codec.chain import build_coder
from isthmus.codec.formats import IntegerCoder
from isthmus.codec.transforms import RotationCoder
from isthmus.job import parse_codec
from tests.codec.cuts import CPU, KEY, noise

pytest.importorskip("triton")
from isthmus.codec.kernels import FusedIntegerCoder, decode_kernel, encode_kernel
from tests.codec.fused_checks import CHECKS

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")

needs_accelerator = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device of kernels here")


@pytest.fixture
def _with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def build(text: str, device: torch.device = CUDA) -> Coder:
    return build_coder(parse_codec(text).steps, CoderSite(width=1024, device=device, memory=Memory()))


@pytest.mark.slow
def test_all_that_must_hold_does_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.codec.fused_checks"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@needs_accelerator
@pytest.mark.parametrize("name", CHECKS)
def test_all_that_must_hold_does_on_an_accelerator(name: str) -> None:
    CHECKS[name](torch.device("cuda", 0))


@pytest.mark.usefixtures("_with_compiler")
@pytest.mark.parametrize(
    "text", ["int8", "int4(stochastic)", "rotate | int8(group=256)", "rotate | int4(stochastic, group=32)"]
)
def test_kernels_are_chosen_where_they_know_the_codec(text: str) -> None:
    assert isinstance(build(text), FusedIntegerCoder)
    assert not isinstance(build(text, CPU), FusedIntegerCoder)


@pytest.mark.usefixtures("_with_compiler")
@pytest.mark.parametrize("text", ["int2", "rotate | int2", "int8(scale=tensor)", "rotate | int4(group=48)"])
def test_other_codecs_are_left_to_torch(text: str) -> None:
    assert isinstance(build(text), IntegerCoder | RotationCoder)


@pytest.mark.usefixtures("_with_compiler")
def test_without_triton_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert isinstance(build("rotate | int4"), RotationCoder)


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert isinstance(build("rotate | int4"), RotationCoder)


@needs_accelerator
@pytest.mark.parametrize("text", ["rotate | int8", "rotate | int4(stochastic)", "int4"])
def test_ends_on_an_accelerator_and_on_the_host_understand_each_other(text: str) -> None:
    spec = parse_codec(text)
    codecs = Codecs(forward=spec, backward=spec, width=1024)
    sending, receiving = CodecEnd(codecs, device=CUDA), CodecEnd(codecs, device=CPU)
    x_ND = noise(33, 1024)  # noqa: N806
    payload = sending.encode(x_ND.to(CUDA), key=KEY)
    arrived = receiving.decode(tuple(part.cpu() for part in payload), key=KEY, num_rows=33)
    seen = sending.decode(payload, key=KEY, num_rows=33, keeps=False)
    torch.testing.assert_close(seen.cpu(), arrived)
    back = receiving.encode_gradient(x_ND, key=KEY)
    gradient = sending.decode_gradient(tuple(part.to(CUDA) for part in back), key=KEY, num_rows=33)
    assert float((gradient.cpu() - x_ND).norm() / x_ND.norm()) < 0.2


class Launches:
    """Stands in for a kernel, and counts how often it is started."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, _grid: tuple[int, int]) -> Callable[..., None]:
        def start(*_args: Any, **_options: Any) -> None:
            self.count += 1

        return start


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[func.name()] += 1
        return func(*args, **kwargs or {})


def coding_work(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, Counter[str]]:
    """Starts of the kernels, and what else is done, in one message there and its gradient back."""
    encodes, decodes = Launches(), Launches()
    monkeypatch.setattr("isthmus.codec.chain._compiles_kernels", lambda _: True)
    monkeypatch.setattr("isthmus.codec.kernels.encode_kernel", encodes)
    monkeypatch.setattr("isthmus.codec.kernels.decode_kernel", decodes)
    spec = parse_codec(text)
    codecs = Codecs(forward=spec, backward=spec, width=1024)
    sending, receiving = CodecEnd(codecs, device=CPU), CodecEnd(codecs, device=CPU)
    x_ND = noise(6, 1024).bfloat16()  # noqa: N806

    def cross() -> None:
        receiving.decode(sending.encode(x_ND, key=KEY), key=KEY, num_rows=6)
        sending.decode_gradient(receiving.encode_gradient(x_ND, key=KEY), key=KEY, num_rows=6)

    cross()  # the first one brings the signs of the rotation to the device
    encodes.count = decodes.count = 0
    with Operations() as operations:
        cross()
    return encodes.count, decodes.count, operations.names


@pytest.mark.parametrize(
    "text", ["rotate | int8", "rotate | int8(stochastic)", "rotate | int4", "rotate | int4(stochastic)"]
)
def test_a_coding_is_one_kernel_and_never_waits_for_the_device(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_encodes, num_decodes, names = coding_work(text, monkeypatch)
    assert (num_encodes, num_decodes) == (2, 2)
    waits = {name for name in names if "local_scalar" in name or "nonzero" in name or "equal" in name}
    assert not waits


def test_all_integers_take_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    of_int8 = coding_work("rotate | int8", monkeypatch)
    assert coding_work("rotate | int4", monkeypatch) == of_int8
    assert coding_work("rotate | int4(stochastic)", monkeypatch) == of_int8


def test_kernels_are_not_compiled_anew_for_other_rows_or_seeds() -> None:
    assert [one.name for one in encode_kernel.params if one.do_not_specialize] == ["num_rows", "seed"]
    assert [one.name for one in decode_kernel.params if one.do_not_specialize] == ["num_rows"]
