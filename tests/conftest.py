"""Settings for all tests."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# The same cases at every run, so that a commit which was green stays so; machines that share their cores are
# slow at times, and speed is a benchmark's business.
settings.register_profile("isthmus", deadline=None, derandomize=True)
# New cases at every run: `make fuzz`.
settings.register_profile("fuzz", deadline=None)
settings.load_profile("isthmus")
# Cases are drawn from constants of the modules that a worker has imported, too, which differ from run to run.
vars(providers)["_get_local_constants"] = Constants

# Several threads per operation wait for each other where tests share the cores. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure out of the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """A world of torch.distributed that is this process alone."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
