"""What libraries make of a checkpoint's files, with one line where they cannot; no code of the folder's own runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What a library's class raises when it is made of values that it does not check.
UNUSABLE = (TypeError, ValueError, LookupError, NameError, AttributeError, ArithmeticError, RuntimeError)


@contextmanager
def made_of(place: Path, name: str) -> Iterator[None]:
    """Within the `with` block a class of that name is made of the values in a file or folder.

    Raises:
        ValueError: it cannot be.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*UNUSABLE, StrictDataclassError) as exc:
        raise ValueError(f"model is damaged: no {name} can be made of {place}: {one_line(exc)}") from exc


def one_line(exc: BaseException) -> str:
    """What an error says, as one line of at most 300 letters after its kind."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split()):.300}"


def open_processor(kind: Any, folder: Path) -> Any:
    """A processor of media, or a tokenizer: of a class of transformers, or AutoTokenizer.

    Raises:
        ValueError: a file is missing or damaged, or asks for code of the folder's own.
    """
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as exc:  # the parsers of vocabularies raise nothing narrower
        raise ValueError(f"model is damaged: no {kind.__name__} can be made of {folder}: {one_line(exc)}") from exc


def open_tokenizer(kind: Any, folder: Path) -> Any:
    """A tokenizer with a vocabulary: without its files transformers makes one that knows no text.

    Raises:
        ValueError: as `open_processor`, or no vocabulary is found.
    """
    tokenizer = open_processor(kind, folder)
    ids = tokenizer("a", add_special_tokens=False).input_ids
    if not ids or set(ids) & set(tokenizer.all_special_ids):
        names = " or ".join(dict.fromkeys(tokenizer.vocab_files_names.values()))
        raise ValueError(f"model is incomplete: the tokenizer of {folder} must have a vocabulary, looked for {names}")
    return tokenizer
