"""What is trained: Hugging Face models cut into stages of contiguous layers.

The way through the room: `families` (where a model's parts lie) → `blueprint` (which model, which head) →
`cut` (stand-ins for other stages' parts) → `load` (one stage with its weights) → `stage` (forward) → `export`
(parts, the model joined from them, and its loss). Beside it: `bottleneck` (a trained boundary
between two stages), `lora` (adapters), `recompute` (layers that keep no activations), `costs` (what a model
costs, measured on fake tensors), `random`, and all private calls in `torch_calls` and `transformers_calls`.
"""

import logging
import pkgutil
from importlib.metadata import version
from typing import Final

from isthmus.errors import UserError

TESTED: Final = {"torch": "2.11 to 2.13", "transformers": "5.22"}
"""The versions that the private names below were tested with."""
PRIVATE_NAMES: Final = (
    "torch:_foreach_mul_",
    "torch:_grouped_mm",
    "torch:_C.FunctionSchema",
    "torch:UntypedStorage._cdata",
    "torch:ops.aten._scaled_dot_product_attention_math",
    "torch:ops.aten._softmax_backward_data",
    "torch._subclasses:FakeTensorMode",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_leaves",
    "transformers:AutoModelForMaskedLM._model_mapping",
    "transformers:PreTrainedModel._init_weights",
    "transformers:PreTrainedModel.get_expanded_tied_weights_keys",
    "transformers:PreTrainedModel.warn_if_padding_and_no_attention_mask",
    "transformers.initialization:no_init_weights",
    "transformers.masking_utils:find_packed_sequence_indices",
)


def check_private_names(names: tuple[str, ...] = PRIVATE_NAMES) -> None:
    """Refuse a version of torch or transformers that lacks a private name which this room calls."""
    for name in names:
        package = name.partition(":")[0].partition(".")[0]
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                raise
            raise UserError(
                f"{package} {version(package)} has no {name.replace(':', '.')}, which Isthmus calls",
                hint=f"install {package} {TESTED[package]}, which Isthmus was tested with",
            ) from error


# Where torchao is installed transformers imports it, and it tells of every kernel for other machines.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
check_private_names()
