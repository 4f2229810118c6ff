"""The grammar of rewards from scorers or rules: a weighted sum, with gates that veto.

    0.7*ocr + 0.3*jpeg
    0.7*ocr + 0.3*vlm as look if clip >= 0.2 and look >= 0.5 else -1
    math + 0.1*format=<think>.*</think>.* if json >= 1 else -1

A term is a name, `python:FILE.py:FUNCTION` or `format=PATTERN`, with a weight (1 by default) and, after `as`, another
name, which is required if the term's name occurs twice. A term of weight 0 is reported but not rewarded. A pattern may
contain any character; it ends before " + " and another term.

A gate consists of a term, in the sum or not, and the least value that passes. A sample below it gets the veto (the
number after `else`), or its sum if that is lower, so that a veto never pays. A veto is a value, not an abstention: a
sample that cheats must score below the others of its group, while an abstention would be left out and never unlearned.
The part GATE is 1 if all gates passed, else 0.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

GATE = "gate"
FORMAT = "format="
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_WEIGHT = rf"(?:(?P<weight>-?{_NUMBER})\s*\*\s*)?"
_NAMED = r"(?P<spec>(?:frames:)?(?:python:[^\s*]+?\.py:[A-Za-z_]\w*|[A-Za-z_]\w*))(?:\s+as\s+(?P<name>[A-Za-z_]\w*))?"
_WHOLE = re.compile(rf"(?P<sum>.+?)(?:\s+if\s+(?P<gates>.+)\s+else\s+(?P<veto>[+-]?{_NUMBER})\s*)?", re.DOTALL)
_TERM = re.compile(rf"\s*(?P<sign>[+-]?)\s*{_WEIGHT}{_NAMED}\s*(?=[+-]|$)")
_GATE = re.compile(rf"\s*(?:{_NAMED}|(?P<pattern>{FORMAT}.*?))\s*>=\s*(?P<least>[+-]?{_NUMBER})\s*", re.DOTALL)
_EXAMPLE = "'0.7*ocr + 0.3*jpeg' or '0.7*ocr + 0.3*jpeg if clip >= 0.2 else 0'"


@dataclass(frozen=True)
class Reward:
    """Parsed reward.

    Args:
        specs: scorer or rule by name, in the sum and the gates.
        weights: weight in the sum, by name.
        gates: threshold of each gate, by name.
        veto: value of a sample that fails a gate; None without gates.
    """

    specs: Mapping[str, str]
    weights: Mapping[str, float]
    gates: Mapping[str, float]
    veto: float | None

    @property
    def is_plain(self) -> bool:
        """True for a single term of weight 1."""
        return not self.gates and list(self.weights.values()) == [1.0]

    def total(self, values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the value of a sample from its values by name, and the part GATE if there are gates."""
        total = math.fsum(weight * values[name] for name, weight in self.weights.items())
        if self.veto is None:
            return total, {}
        passed = all(values[name] >= threshold for name, threshold in self.gates.items())
        return (total if passed else min(total, self.veto)), {GATE: float(passed)}


def parse(text: str, names: Collection[str] = ()) -> Reward:
    """Parse a reward.

    names: names of terms that end a pattern.

    Raises:
        ValueError: the text does not follow the grammar in this module's docstring.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise ValueError(f"a reward must be a name or read like {_EXAMPLE}, got {text!r:.200}")
    after = rf"\s\+\s+(?:-?{_NUMBER}\s*\*\s*)?(?:{FORMAT}|python:|(?:{'|'.join(names) or '(?!)'})\s*(?:\s\+\s|$))"
    formats = re.compile(rf"\s*(?P<sign>[+-]?)\s*{_WEIGHT}(?P<pattern>{FORMAT}.*?)(?={after}|$)", re.DOTALL)
    specs: dict[str, str] = {}
    weights: dict[str, float] = {}
    left = whole["sum"]
    while left:
        term = formats.match(left) or _TERM.match(left)
        if term is None:
            raise ValueError(f"a reward must be a name or read like {_EXAMPLE}, got {left!r:.200} in it")
        left = left[term.end() :]
        name = _add(specs, term)
        if name in weights:
            raise ValueError(f"a reward must not have two terms {name!r}; 'as' gives one another name")
        weights[name] = _finite(term["sign"] + "1") * _finite(term["weight"] or "1")
    gates: dict[str, float] = {}
    for part in re.split(r"\s+and\s+", whole["gates"]) if whole["gates"] else []:
        gate = _GATE.fullmatch(part)
        if gate is None:
            raise ValueError(f"a gate must read like 'clip >= 0.2', got {part!r:.200}")
        name = gate["spec"] if gate["spec"] in specs and not gate["name"] else _add(specs, gate)
        if name in gates:
            raise ValueError(f"a reward must not have two gates {name!r}")
        gates[name] = _finite(gate["least"])
    return Reward(specs, weights, gates, _finite(whole["veto"]) if whole["veto"] else None)


def _add(specs: dict[str, str], match: re.Match[str]) -> str:
    """Add a term to specs and return its name."""
    groups = match.groupdict()
    spec = groups.get("spec") or groups["pattern"]
    name = groups.get("name") or (spec.rpartition(":")[2] if groups.get("spec") else FORMAT.rstrip("="))
    if name == GATE:
        raise ValueError(f"a reward must not have a term {GATE!r}; 'as' gives it another name")
    if specs.setdefault(name, spec) != spec:
        raise ValueError(f"a reward must not call both {specs[name]} and {spec} {name!r}; 'as' gives one another name")
    return name


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number must be finite, got {text:.80}")
    return number
