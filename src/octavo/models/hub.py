"""Fetches a model from the Hugging Face hub into its local cache, and explains why when it cannot.

Owns the choice of files to fetch (configs, tokenizer, safetensors; never pickles). What comes back is a path on
this machine that `files` checks like any other.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.errors import ModelError
from octavo.models.files import hub_gguf
from octavo.models.gguf_file import parts_of

_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_TOKENIZER = ("*token*", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*", "adapter_*")


def fetch_tokenizer(name: str) -> Path:
    """The directory of a hub model's tokenizer, without its weights."""
    return fetch(name, None, _TOKENIZER)


def fetch(model: str, revision: str | None, wanted: tuple[str, ...] = _WANTED) -> Path:
    """The directory (or GGUF file) of a hub model at `revision`, from the cache or the network."""
    named = hub_gguf(model)
    try:
        if named is not None:
            repo, inside = named
            parts = [str(part) for part in parts_of(Path(inside))]
            fetched = [hf_hub_download(repo, part, revision=revision) for part in parts]
            return Path(fetched[parts.index(inside)])
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(_UNWANTED))
        )
    except GatedRepoError as error:
        remedy = "the hub gives it only to those who accepted its terms. Accept them on its page, then `hf auth login`"
        raise ModelError("model", model, remedy) from error
    except RevisionNotFoundError as error:
        raise ModelError("revision", revision, f"{model} has no such revision. Name a branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        remedy = "there is no such directory here and no such model on the hub. Correct the name, or log in if private"
        raise ModelError("model", model, remedy) from error
    except LocalEntryNotFoundError as error:
        remedy = ("there is no such directory here, the hub cannot be reached, and its cache does not hold the model. "
                  "Name a local directory, or fetch the model where there is a network")  # fmt: skip
        raise ModelError("model", model, remedy) from error
    except Exception as error:  # network libraries raise their own kinds
        raise ModelError("model", model, f"it cannot be fetched from the hub ({type(error).__name__}: {error}). Try "
                                         "again, or name a local directory") from error  # fmt: skip
