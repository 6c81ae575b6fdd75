"""What is trained: Hugging Face models cut into stages of contiguous layers.

The way through the room: `blueprint` (which model, which head) → `assembly` (one stage with its weights) →
`stage` (forward) → `export` (parts, and the model joined from them) → `exported` (its loss). Beside it:
`mixing` (whether padding matters), `bottleneck` (a trained boundary between two stages) with `wrapping` (its
export), `freeze` (layers that do not learn), `lora` (adapters that do) and `recompute` with `budget` (layers
that keep no activations, as a memory budget asks for).
"""

import logging

# Where torchao is installed transformers imports it, and it tells of every kernel for other machines.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
