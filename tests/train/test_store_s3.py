"""Checkpoints in object storage: moto's S3 server on this machine stands for it."""

import os
from collections.abc import Iterator

import pytest

from isthmus.errors import UserError
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.in_cloud import World
from isthmus.train.keeper import Keeper, State
from isthmus.train.members import SavedSteps
from isthmus.train.records import MANIFEST_FILE, RemoteStore
from tests.model.cases import blueprint, build
from tests.train.chain import make_optimizer
from tests.train.reference import assert_same
from tests.train.resuming import save_now
from tests.train.test_saving import weights

pytestmark = pytest.mark.slow


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server with one bucket, which fsspec finds as its configuration says."""
    monkeypatch.setitem(os.environ, "AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setitem(os.environ, "AWS_DEFAULT_REGION", "us-east-1")
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="checkpoints")
    quick = {"retries": {"max_attempts": 0}, "connect_timeout": 2}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": url, "config_kwargs": quick})
    yield "s3://checkpoints/prefix"
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def keeper_of(store: RemoteStore, notes: list[str]) -> tuple[Checkpoints, Keeper]:
    (stage,) = build(blueprint("llama"), [range(4)])
    checkpoints = Checkpoints(store, cloud="north", keep=2, note=notes.append)
    return checkpoints, Keeper(checkpoints, World(), stage=stage, optimizer=make_optimizer(stage, None))


def test_a_bucket_holds_checkpoints_like_a_disk(address: str) -> None:
    notes: list[str] = []
    store = RemoteStore(address)
    checkpoints, keeper = keeper_of(store, notes)
    for step in (10, 20, 30):
        save_now(keeper, State(step=step))
    assert checkpoints.steps() == (20, 30)
    expected = weights(keeper)
    (name,) = [path for path in store.list() if path.startswith("step-00000030/north/weights")]
    data = store.get(name)
    store.put(name, [data[:-1] + bytes([data[-1] ^ 1])])
    store.put("step-00000040/north/weights.0.ab.safetensors", [b"cut short"])
    again, other = keeper_of(store, notes)
    assert again.inspect() == SavedSteps(whole=(20,), damaged=(30,))
    assert notes[0] == "removed step-00000040/north, a checkpoint that was cut short"
    assert "step-00000030/north is left out: weights." in notes[1]
    other.load(20)
    assert_same(weights(other), expected)
    save_now(other, State(step=25))
    assert again.steps() == (20, 25)
    assert sum(path.endswith(MANIFEST_FILE) for path in store.list()) == 2


def test_a_bucket_that_nobody_reaches_is_refused_at_the_start(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setitem(fsspec.config.conf["s3"], "endpoint_url", "http://127.0.0.1:9")
    store = RemoteStore(address)
    with pytest.raises(UserError, match=f"the checkpoints in {address} cannot be reached"):
        Checkpoints(store, cloud="north").inspect()
    with pytest.raises(UserError, match="cannot be reached"):
        keeper_of(store, [])
