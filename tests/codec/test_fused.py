"""Kernels make and read the bytes that the coders in torch do, and are chosen where they can be."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isthmus.codec import Codecs, receiving_end, sending_end
from isthmus.codec.base import Coder, Memory, Place
from isthmus.codec.build import build_coder
from isthmus.codec.integers import IntegerCoder
from isthmus.codec.rotation import RotationCoder
from isthmus.job import parse_codec
from tests.codec.cuts import CPU, KEY, noise

pytest.importorskip("triton")
from isthmus.codec.fused import FusedIntegerCoder
from tests.codec.fused_checks import CHECKS

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")

needs_accelerator = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device of kernels here")


@pytest.fixture
def _with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def build(text: str, device: torch.device = CUDA) -> Coder:
    return build_coder(parse_codec(text).steps, Place(width=1024, device=device, memory=Memory()))


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
    sending, receiving = sending_end(codecs, device=CUDA), receiving_end(codecs, device=CPU)
    x_ND = noise(33, 1024)  # noqa: N806
    payload = sending.encode(x_ND.to(CUDA), key=KEY)
    arrived = receiving.decode(tuple(part.cpu() for part in payload), key=KEY, num_rows=33)
    seen = sending.preview(payload, key=KEY, num_rows=33)
    torch.testing.assert_close(seen.cpu(), arrived)
    back = receiving.encode_gradient(x_ND, key=KEY)
    gradient = sending.decode_gradient(tuple(part.to(CUDA) for part in back), key=KEY, num_rows=33)
    assert float((gradient.cpu() - x_ND).norm() / x_ND.norm()) < 0.2
