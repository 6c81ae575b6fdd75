"""Nothing that came over a link or from a disk is unpickled: that would run code of whoever wrote it."""

import ast
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from tests.model.cases import blueprint
from tests.train.chain import Given, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.test_checkpoint import load_all, save_all
from tests.train.test_codecs import cut
from tests.train.test_exactness import batches

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Of torch, torch.distributed, numpy and pandas.
CALLS = {
    "torch.load", "torch.jit.load", "np.load", "numpy.load", "pd.read_pickle",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip


def found_in(tree: ast.AST) -> Iterator[str]:
    """The forbidden modules and functions that code names."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=func):
                text = ast.unparse(func)
                yield from (one for one in CALLS if text == one or text.endswith(f".{one}"))
                yield from (one for one in ("eval", "exec") if text == one)
            case ast.keyword(arg="allow_pickle" | "weights_only"):
                yield f"{node.arg}="


def test_no_module_names_what_unpickles() -> None:
    folder = Path(isthmus.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 50
    found = {
        str(path.relative_to(folder)): names
        for path in files
        if (names := list(found_in(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(x)", "dist.all_gather_object(a, b)",
     "np.load(x, allow_pickle=True)", "eval(x)"],
)  # fmt: skip
def test_what_unpickles_would_be_found(code: str) -> None:
    assert list(found_in(ast.parse(code)))


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.mark.usefixtures("no_pickle")
def test_a_run_that_is_saved_and_resumed_unpickles_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.load(io.BytesIO())
    plan = blueprint("llama")
    steps, held_out = batches(plan, 2), batches(plan, 2, num_steps=1)[0]
    cuts = (
        cut("subspace(6, every=2) | int8", "int8(stochastic)", guard_every=1),
        cut("int4", "int4(stochastic)", boundary="bottleneck(5, warmup=2)"),
    )
    agreed = config(3, 2, cuts=cuts, evaluate_every=2, num_validation_microbatches=2)
    with chain(plan, agreed) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps, held_out))
    with chain(plan, agreed) as resumed:
        states = load_all(resumed, tmp_path, 1)
        resumed.run(Given(steps, held_out), first_step=1, states=states)
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))
