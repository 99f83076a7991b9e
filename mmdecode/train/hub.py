"""Publishing of drafters on the Hugging Face Hub: the model page and the upload.

An uploaded drafter can be loaded by its Hub id wherever the folder of a drafter is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError, OptionError
from mmdecode.runs.files import LISTING, MAKER, is_own, write_file

OURS = f"<!-- made by {MAKER} from card.json; without this line the page is left as it is -->"
DRAFTS = {"eagle3": "eagle:path=", "text": "assistant:model="}
"""Start of the ``draft=`` value that loads a drafter, for kinds where it is not ``KIND:path=``."""
LEFT_OUT = ["state/**", ".cache/**", "*.tmp", "*.tmp/**", LISTING]
"""Patterns of files that are not uploaded: training state, temporary files, list of own files."""


def write_model_page(folder: str | Path, card: Mapping[str, Any], name: str = "") -> Path:
    """Writes the model page ``README.md`` of a drafter, unless the user wrote or edited it.

    Args:
        folder: Folder of the drafter.
        card: Settings and results of its training, the content of ``card.json``.
        name: Id of the drafter on the Hub; ``""``: the folder's name.

    Returns:
        Path of the page.
    """
    page = Path(folder) / "README.md"
    if not page.exists() or is_own(page):
        write_file(page, model_page(card, name or Path(folder).name))
    return page


def model_page(card: Mapping[str, Any], name: str) -> str:
    """Returns a model page in Markdown with the Hub's metadata header, without a licence.

    Args:
        card: Settings and results of the drafter's training, the content of ``card.json``.
        name: Title of the page: the drafter's id on the Hub or the name of its folder.
    """
    target, options, requests = card["model"], card["options"], card["requests"]
    judged = "tested" if requests["tested"] else "held_out"
    asked = f" of `{card['data']}`" if card["data"] else ""
    spec = DRAFTS.get(options["kind"], f"{options['kind']}:path=") + name
    accepted = ", ".join(f"{share:.2f}" for share in card["accepted_by_position"])
    # the Hub cannot link to a folder or a zoo model
    linked = target.count("/") == 1 and not Path(target).exists()
    lines = ["---", "library_name: mmdecode"]
    lines += [f"base_model: {target}"] if linked else []
    lines += ["tags:", "- speculative-decoding", "- mmdecode", f"- {options['kind']}", "---", OURS]
    chosen = "" if judged == "tested" else "; they also chose the checkpoint"
    lines += [
        f"\n# {name}\n",
        f"{card['what'][0].upper()}{card['what'][1:]}, trained for `{target}`, with "
        f"{card['parameters_learnt'] / 1e6:.2f} M parameters. It drafts tokens that the target "
        "then verifies: the output is the target's own.\n",
        "```python",
        "import mmdecode as mm",
        _use(card["what"].rpartition(" ")[2], target, spec),
        "```\n",
        f"- Tokens per pass, with a chain of {card['chain']}, on {requests[judged]} requests that "
        f"were not learned: {card['tokens_per_pass']:.2f} (1 without a drafter{chosen}).",
        f"- Share of passes that accepted at least so many drafted tokens: {accepted}.",
        f"- Entropy of the target along its answers: {card['entropy_bits_per_token']:.2f} bits per "
        "token.",
        f"- Learned from the target's own answers to {requests['learnt']} requests{asked}, "
        f"{card['steps']} steps in {card['precision']}.",
        "- Settings and numbers: `card.json`.",
    ]
    return "\n".join(lines) + "\n"


def _use(family: str, target: str, spec: str) -> str:
    """Returns the line of Python that runs a target with a drafter.

    Args:
        family: Class name of the target.
        target: Name of the target's checkpoint.
        spec: Value of ``draft=`` that loads the drafter.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return f'answerer = mm.vlm.Answerer.from_pretrained("{target}", draft="{spec}")'
    if family == "LlamaGenForImageGeneration":
        return f'draw = mm.image_ar.ImageGenerator.from_pretrained("{target}", draft="{spec}")'
    return f'decoder = mm.Decoder(draft="{spec}")  # for mm.generate(model, ..., decoder=decoder)'


def check_push(name: str) -> None:
    """Checks the repository name and the login to the Hub, before a long training starts.

    Raises:
        InputError: No access token of the Hub is found.
        OptionError: ``name`` is not a valid ``USER/NAME``.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(f"{name!r} is not a valid repository name: {error}") from error
    if "/" not in name:
        raise OptionError(f"{name!r} has no owner; expected USER/NAME")
    if get_token() is None:
        raise InputError(
            f"pushing {name} needs an access token of the Hub, and nobody is logged in; run 'hf "
            "auth login', or set HF_TOKEN"
        )


def push(folder: str | Path, name: str, private: bool | None = None) -> str:
    """Uploads a drafter's folder to the Hub, without the state of its training.

    Args:
        folder: Folder with weights and ``config.json``; the title of its model page becomes
            ``name``.
        name: Repository, ``USER/NAME``; created if it does not exist.
        private: Whether a new repository is private; ``None``: the account's default.

    Returns:
        URL of the repository.

    Raises:
        InputError: The folder holds no drafter, no access token is found or it has no write
            permission, or the Hub cannot be reached.
        OptionError: ``name`` is not a valid ``USER/NAME``.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_push(name)
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise InputError(f"{folder} holds no config.json; give the folder of a trained drafter")
    if (folder / "card.json").exists():
        write_model_page(
            folder, json.loads((folder / "card.json").read_text(encoding="utf-8")), name
        )
    api = HfApi(library_name="mmdecode")
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Drafter by mmdecode",
            ignore_patterns=LEFT_OUT,
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"the access token has no write permission for {name} (HTTP {status}); create a "
                "token that has it, or push to a repository of your own"
            ) from error
        raise InputError(f"the Hub refused {name}: {_short(error)}") from error
    except OSError as error:
        raise InputError(f"the Hub cannot be reached: {_short(error)}") from error
    return str(url)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
