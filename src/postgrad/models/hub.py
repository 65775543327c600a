"""Models from the Hugging Face hub: safetensors, JSON and tokenizer files only. Fails within seconds when the hub cannot be reached."""

from __future__ import annotations

import re
from pathlib import Path

from postgrad.errors import ModelError
from postgrad.models.quiet import quiet
from postgrad.models.weights import PICKLE_SUFFIXES

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_NEVER_AN_ID = (".gguf", ".safetensors", ".json", ".yaml", ".yml", *PICKLE_SUFFIXES)
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
_SECONDS = 4.0


def looks_like_id(name: str) -> bool:
    """Whether the hub could know this name: `org/model` or a bare name, nothing that can only be a path.

    >>> looks_like_id("HuggingFaceTB/SmolLM2-135M"), looks_like_id("./model"), looks_like_id("a/b/c"), looks_like_id("x/model.gguf")
    (True, False, False, False)
    """
    return _ID.fullmatch(name) is not None and not name.endswith(_NEVER_AN_ID)


def fetch(hub_id: str, *, hint: str | None = None) -> Path:
    """The model's folder in the hub's cache, downloaded if needed. `hint` is for the reader of the error when that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(hub_id, timeout=_SECONDS)
    except GatedRepoError as error:
        raise ModelError("this hub model is gated", where=hub_id, hint="accept its terms on the hub, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        what = "no such file or folder, and the hub knows no such model"
        raise ModelError(what, where=hub_id, hint=hint or "check the spelling; a private model needs `hf auth login`") from error
    except (HfHubHTTPError, OSError) as error:
        return _cached(hub_id, error, hint)
    except Exception as error:
        # The HTTP client's own exceptions differ between versions of huggingface_hub. None is swallowed: the cache answers or we raise.
        return _cached(hub_id, error, hint)
    _refuse_pickle_only(hub_id, [sibling.rfilename for sibling in info.siblings or []])
    return _download(hub_id, info.sha)


def _refuse_pickle_only(hub_id: str, files: list[str]) -> None:
    if not any(file.endswith(".safetensors") for file in files):
        found = [file for file in files if file.endswith(PICKLE_SUFFIXES)]
        what = (
            f"this hub model has only pickle weights ({', '.join(found[:3])})"
            if found
            else "this hub repository holds no safetensors weights"
        )
        raise ModelError(what, where=hub_id, hint="look for a safetensors version; postgrad never opens pickle files: they can run code")


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with quiet():
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_WANTED)))


def _cached(hub_id: str, cause: Exception, hint: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_WANTED), local_files_only=True))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"no such file or folder, not in the hub's cache, and the hub cannot be reached ({str(cause).partition(chr(10))[0]})",
            where=hub_id,
            hint=hint or "name a folder on this machine, or `smollm2-135m`, which needs no network",
        ) from cause
