"""Media of prompts, and chats: messages in OpenAI's format, whose parts may be media."""

import re
from collections.abc import Mapping

ROLES = ("system", "user", "assistant")
FILES = {"image": "images", "audio": "audio", "video": "video"}  # kinds of message parts -> the line's key of files
_OF = "(input|source|src|cond|condition|reference|ref|edit|kontext|control|start|first)_"
_AS = "(_(path|file|url)s?)?"
ELSEWHERE = {  # the key here -> other projects' names for it
    "images": re.compile(f"({_OF})?(image|img)s?{_AS}|(first|start)_frame(_image)?{_AS}"),
    "audio": re.compile(f"({_OF})?(audio|wav)s?{_AS}"),
    "video": re.compile(f"({_OF})?videos?{_AS}"),
}
PLACE = re.compile(r"<\|?(image|img|audio|sound|video)(_?\d+|_pad|_placeholder)?\|?>", re.IGNORECASE)


def check_media(entry: Mapping[str, object]) -> None:
    """Raise ValueError if a line names a medium under a key that is not read here.

    A line that also has the right key may have other keys for its scorer.
    """
    for medium, names in ELSEWHERE.items():
        for key, value in entry.items() if not entry.get(medium) else ():
            if key != medium and names.fullmatch(key) and value and isinstance(value, str | list | dict):
                raise ValueError(f'"{key}" must be called "{medium}", as nothing reads it, got {value!r:.80}')


def check_placeholders(text: str, entry: Mapping[str, object]) -> None:
    """Raise ValueError if a text has a placeholder for a medium and its line has media."""
    if (match := PLACE.search(text)) and any(entry.get(key) for key in FILES.values()):
        hint = 'a part {"type": "image"} of messages has its place, and without parts media come before the text'
        raise ValueError(f"the text must not hold {match[0]}, which no model here reads: {hint}")


def extract_chat(messages: object, entry: dict[str, object]) -> str:
    """Return the text of the user's last message; move its files to the line's keys, and the chat to "messages".

    If the last message is the assistant's, it is the completion of the prompt before it: its text goes to "completion".

    Raises:
        ValueError: the messages or their parts are malformed, or the prompt does not end with the user's message.
    """
    if type(messages) is not list or not messages:
        raise ValueError(f'"messages" must be a list with at least one, got {messages!r:.80}')
    files: dict[str, list[object]] = {kind: [] for kind in FILES}
    chat: list[dict[str, object]] = []
    text = ""
    for number, message in enumerate(map(_drop_null, messages), start=1):
        if message.keys() != {"role", "content"} or message["role"] not in ROLES:
            rule = f'message {number} must have "content" and a "role" of {", ".join(ROLES)}, and no more'
            raise ValueError(f"{rule}, got {messages[number - 1]!r:.80}")
        content = message["content"]
        content_parts = [{"type": "text", "text": content}] if type(content) is str else content
        if type(content_parts) is not list:
            raise ValueError(f'message {number}: "content" must be a string or a list of parts, got {content!r:.80}')
        parts = [_part(part, files, number) for part in content_parts]
        text = "".join(part.get("text", "") for part in parts)
        is_text = all(part["type"] == "text" for part in parts)
        if is_text and not text.strip():
            raise ValueError(f"message {number} must not be empty")
        chat.append({"role": message["role"], "content": text if is_text else parts})
    if chat[-1]["role"] == "assistant":
        if entry.get("completion") is not None:
            rule = '"completion" must be left out beside messages that end with the assistant\'s'
            raise ValueError(f"{rule}, got {entry['completion']!r:.80}")
        entry["completion"] = chat.pop()["content"]
        if not isinstance(entry["completion"], str):
            raise ValueError(f"the last message of an assistant must be a text, got {entry['completion']!r:.80}")
    if not chat or chat[-1]["role"] != "user":
        last = repr(chat[-1]["role"]) if chat else "none"
        raise ValueError(f"the prompt must end with a message of the user, got {last}")
    text = "".join(_texts(chat[-1]["content"]))
    check_placeholders(
        " ".join(text_part for message in chat for text_part in _texts(message["content"])), entry | files
    )
    for kind, key in FILES.items():
        _assign_files(entry, key, files[kind])
    entry["messages"] = chat
    return text


def answer_text(value: object, key: str, prompt: str) -> str:
    """Return an answer: a text, or a chat of one assistant message, which may follow the prompt's own message.

    key: key of the answer, for messages. prompt: its text.
    """
    text = value
    if isinstance(value, list):
        messages = [_drop_null(message) for message in value]
        if len(messages) == 2 and messages[0] == {"role": "user", "content": prompt}:
            del messages[0]
        is_one = len(messages) == 1 and messages[0].get("role") == "assistant"
        text = messages[0].get("content") if is_one else None
        if isinstance(text, list) and all(_drop_null(part).get("type") == "text" for part in text):
            text = "".join(_texts(text))
    if not isinstance(text, str) or not text.strip():
        rule = (
            f'"{key}" must be a text that is not empty, or a chat of one message of the assistant, after the prompt\'s'
        )
        raise ValueError(f"{rule} or without it, got {value!r:.80}")
    return text


def single_text(value: object, key: str) -> str:
    """Return a text, "" for None, or the text of a chat of one user message. key: key of the value, for messages."""
    if value is None:
        return ""
    if type(value) is list:
        message = _drop_null(value[0]) if len(value) == 1 else {}
        if message.get("role") != "user" or type(message.get("content")) is not str:
            raise ValueError(f'"{key}" must be a string, or a chat of one message, the user\'s, got {value!r:.80}')
        value = message["content"]
    if type(value) is not str:
        raise ValueError(f'"{key}" must be a string, got {type(value).__name__}')
    return value


def _texts(content: object) -> list[str]:
    """Return the texts of a message's content."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part["text"]) for part in parts if "text" in part]


def _drop_null(value: object) -> dict[str, object]:
    """Return an object's entries that are not null; in a table, an entry is null if only other rows have it."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def _part(part: object, files: Mapping[str, list[object]], number: int) -> dict[str, str]:
    """Return a message part as templates read it; append its file to `files`, or None if the line names the file."""
    entry = _drop_null(part)
    kind = entry.get("type")
    if kind == "text" and entry.keys() == {"type", "text"} and type(entry["text"]) is str:
        return {"type": "text", "text": entry["text"]}
    names = [value for key, value in entry.items() if key != "type" and key in (kind, "path")]
    if type(kind) is str and kind in FILES and len(entry) == 1 + len(names) <= 2 and all(type(n) is str for n in names):
        files[kind].append(names[0] if names else None)
        return {"type": kind}
    rule = 'must be {"type": "text", "text": TEXT} or {"type": "image", "image": PATH}, "audio" and "video" likewise'
    raise ValueError(f"message {number}: a part {rule}, got {part!r:.80}")


def _assign_files(entry: dict[str, object], key: str, files: list[object]) -> None:
    """Put the files named by a chat's parts under a key of the line, or check the files that the line itself names."""
    value = entry.get(key)
    listed = value if isinstance(value, list) else [value] * (value is not None)
    part_files = [name for name in files if name is not None]
    is_whole = len(files) == len(part_files or listed) and not (part_files and listed)
    if not is_whole or (len(files) > 1 and key != "images"):
        limit = "" if key == "images" else ", at most one"
        rule = f'messages must have a part for each file of "{key}"{limit}, which the parts name, or else the line'
        raise ValueError(f"{rule}, got parts {files} and files {listed!r:.80}")
    if part_files:
        entry[key] = part_files if key == "images" else part_files[0]
