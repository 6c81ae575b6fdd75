"""Files of a model in a folder or on the Hugging Face hub, whose client keeps what it has fetched before.

The hub's client retries a connection for most of a minute, so one request without retries asks first whether
the hub can be reached at all. Where it cannot, only what was fetched before is read.
"""

import ssl
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.job.spec import Job

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
GENERATION_FILE: Final = "generation_config.json"
_REACHABLE_WITHIN_S: Final = 2.0


def find_file(source: str, file: str, *, is_required: bool = False) -> Path | None:
    """Return the local path of a model's file, fetched if need be; None where the model has no such file.

    Where the hub cannot be reached, a model that was fetched before has only the files that were fetched: a
    file that is required is then an error.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise UserError(
            f"{source!r} is no folder here, and the hub's client is not installed",
            hint="pip install huggingface_hub, or give a folder with a config.json",
        ) from error
    try:
        return Path(hf_hub_download(source, file, local_files_only=_why_unreachable() is not None))
    except errors.LocalEntryNotFoundError as error:
        if not is_required and _is_known(source):
            return None
        why = str(_why_unreachable() or error.__cause__ or error).partition("\n")[0]
        raise UserError(
            f"the Hugging Face hub cannot be reached ({why}), and {file} of {source!r} is not cached here",
            hint="give a folder with the model, or copy the hub's cache (HF_HOME) from where it was fetched",
        ) from error
    except errors.EntryNotFoundError:
        return None
    except errors.GatedRepoError as error:
        raise UserError(f"{source!r} is gated on the hub", hint="get access, then hf auth login") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise no_model(source) from error


def check_model(job: Job) -> None:
    """Refuse a job whose model is neither here nor on the hub, before torch is imported."""
    model = job.model
    decoder = None if model is None or model.abnet is None else model.abnet.decoder
    for source in (None if model is None else model.source, decoder):
        if source is not None and find_file(source, CONFIG_FILE) is None:
            raise no_model(source)


def no_model(source: str) -> UserError:
    """Return the error for a name that is neither a folder with a model nor on the hub."""
    return UserError(
        f"no model is found at {source!r}",
        hint="give a folder with a config.json, or the name of a model on the Hugging Face hub",
    )


def needs_code(error: Exception) -> bool:
    """Whether transformers has refused to run code that a model or tokenizer brings."""
    return "trust_remote_code" in str(error)


def code_not_run(name: str) -> UserError:
    """Return the error for a model or tokenizer that does not work without its own code."""
    return UserError(
        f"{name} brings Python code of its own, which is not run unless the job says so",
        hint="read the code, and if you trust it, set model.trust_remote_code = true",
    )


@cache
def _why_unreachable() -> str | None:
    """Ask the hub once in a process, without retries; any answer will do."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310 the hub's address
        urllib.request.urlopen(request, timeout=_REACHABLE_WITHIN_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        # The hub's client may trust other certificates than Python does.
        return None if isinstance(reason, ssl.SSLError) else str(reason)
    return None


def _is_known(source: str) -> bool:
    """Whether the model was fetched before; then it has no files but those in the cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(source, CONFIG_FILE), str)
