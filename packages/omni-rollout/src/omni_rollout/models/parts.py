"""Library objects built from a checkpoint's files; errors are one line, and no code from the folder runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_rollout.files import check_fetched

RELEASED = Path(__file__).parents[1] / "released"  # configurations without weights or vocabularies
# Errors that a library's class raises for values that it does not check.
UNUSABLE = (TypeError, ValueError, LookupError, NameError, AttributeError, ArithmeticError, RuntimeError)


@contextmanager
def checked_build(place: Path, name: str) -> Iterator[None]:
    """Report an error of the `with` block, which builds the class `name` from a file or folder.

    Raises:
        ValueError: the block raised one of UNUSABLE.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*UNUSABLE, StrictDataclassError) as exc:
        raise ValueError(f"model is damaged: no {name} can be made of {place}: {one_line(exc)}") from exc


def one_line(exc: BaseException) -> str:
    """Return an error's kind and message as one line; the message has at most 300 characters."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split()):.300}"


def open_processor(kind: Any, folder: Path) -> Any:
    """Return a media processor or tokenizer of a transformers class.

    Raises:
        ValueError: a file is missing or damaged, or requires code from the folder.
    """
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as exc:  # vocabulary parsers raise no narrower exception
        for file in sorted(path for path in folder.glob("*") if path.is_file()):
            check_fetched(file)
        raise ValueError(f"model is damaged: no {kind.__name__} can be made of {folder}: {one_line(exc)}") from exc


def open_tokenizer(kind: Any, folder: Path) -> Any:
    """Return a tokenizer with a vocabulary; without its files, transformers would return one without tokens.

    For a configuration in RELEASED, which has no vocabulary, return a word tokenizer.

    Raises:
        ValueError: as in `open_processor`, or the vocabulary is missing.
    """
    if RELEASED in folder.parents and getattr(kind, "vocab_files_names", True):  # a byte tokenizer needs none
        from omni_rollout.models.words import WordTokenizer

        return open_processor(WordTokenizer, folder)
    tokenizer = open_processor(kind, folder)
    ids = tokenizer("a", add_special_tokens=False).input_ids
    if not ids or set(ids) & set(tokenizer.all_special_ids):
        names = " or ".join(dict.fromkeys(tokenizer.vocab_files_names.values()))
        raise ValueError(f"model is incomplete: the tokenizer of {folder} must have a vocabulary, looked for {names}")
    return tokenizer
