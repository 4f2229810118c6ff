"""Untrusted texts made safe for a terminal."""

import re


def printable(text: str) -> str:
    """Return an untrusted text for a terminal, without credentials in URLs and with spaces for control characters.

    Line feeds are kept.
    """
    bare = strip_credentials(text)
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in bare)


def strip_credentials(text: str) -> str:
    """Return a text without user names and passwords in URLs: the userinfo of an authority (RFC 3986, section 3.2)."""
    return re.sub(r"(?<=://)[^\s/?#\"]*@", "", text)


def one_line(text: object) -> str:
    """Return an untrusted text on one line, otherwise as in `printable`."""
    return printable(str(text).strip().replace("\n", " "))
