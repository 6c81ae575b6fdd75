"""What is trained: Hugging Face models cut into stages of contiguous layers.

The way through the room: `families` (where a model's parts lie) → `blueprint` (which model, which head) →
`cut` (stand-ins for other stages' parts) → `load` (one stage with its weights) → `stage` (forward) → `export`
(parts, the model joined from them, and its loss). Beside it: `bottleneck` (a trained boundary
between two stages), `lora` (adapters), `recompute` (layers that keep no activations), `costs` (what a model
costs, measured on fake tensors), `random`, and all private calls in `torch_calls` and `transformers_calls`.
"""

import logging

# Where torchao is installed transformers imports it, and it tells of every kernel for other machines.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
