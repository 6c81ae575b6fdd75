from typing import Any

import pytest
import torch

from isthmus.model.blueprint import split_layers
from tests.model.cases import CONFIGS, blueprint, build, make_batch, run_pass


# Torch's compiler raises, and means to hide, warnings of its own.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", ["llama"])
@pytest.mark.slow
def test_compiled_layers_give_what_they_gave_at_any_length_recomputed_or_not(model_type: str) -> None:
    """The backend takes each layer as a graph, forward and backward, and leaves its kernels as they are."""
    no_dropout: dict[str, Any] = {key: 0.0 for key in CONFIGS[model_type] if "drop" in key}
    plan = blueprint(model_type, **no_dropout, num_hidden_layers=2)
    torch._dynamo.reset()
    plain, compiled = (build(plan, split_layers(2, 2), untie=True, recompute=True) for _ in range(2))
    for stage in compiled:
        stage.compile_layers(dynamic=True, backend="aot_eager")
    for lengths in ((9, 4), (5, 8), (12, 2)):
        batch = make_batch(plan.head, lengths=lengths)
        expected, found = run_pass(plain, batch), run_pass(compiled, batch)
        assert torch.allclose(found.loss, expected.loss, rtol=1e-6)
        for name, grad in expected.grads.items():
            other = found.grads[name]
            assert (grad is None) == (other is None)
            assert grad is None or other is None or torch.allclose(other, grad, rtol=1e-5, atol=1e-6), name
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < num_graphs <= 4
