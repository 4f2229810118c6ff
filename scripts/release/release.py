"""Check that the tree is ready for a release, build its wheels, and tag it: `scripts/release/release.py --dry-run`.

A dry run does everything except the tag, which it prints. Nothing is ever pushed or uploaded.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import wheels


def main() -> None:
    """Exit with code 1 and one line per fault, or build the wheels and tag."""
    parser = argparse.ArgumentParser(description="Check, build and tag a release; nothing is pushed or uploaded.")
    parser.add_argument("--dry-run", action="store_true", help="print the tag instead of making it")
    parser.add_argument("--out", type=Path, default=wheels.ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument("--repository", default="", help="address of the sources on the web, for links and metadata")
    args = parser.parse_args()
    root, version = wheels.ROOT, stated_versions(wheels.ROOT)["pyproject.toml"]
    found = version_faults(stated_versions(root)) + changelog_faults(
        (root / "CHANGELOG.md").read_text("utf-8"), version
    )
    found += tree_faults(git("status", "--porcelain"), git("tag", "--list", f"v{version}"), version)
    if found:
        sys.exit("\n".join(f"release: {fault}" for fault in found))
    for wheel in wheels.build(args.out, wheels.PACKAGES, repository=args.repository):
        print(wheel)
    if args.dry_run:
        print(f"would tag {git('rev-parse', '--short', 'HEAD').strip()} as v{version}")
    else:
        git("tag", "--annotate", f"v{version}", "--message", f"omni-rl {version}")
        print(f"tagged v{version}; `git push origin v{version}` publishes the tag")


def git(*words: str) -> str:
    """Return the output of a git command in this repository."""
    return subprocess.run(["git", *words], cwd=wheels.ROOT, check=True, capture_output=True, text=True).stdout


def stated_versions(root: Path) -> dict[str, str]:
    """Return the version in each file: of the workspace, of all packages and their modules, and of the citation."""
    names = ["pyproject.toml", *(f"packages/{name}/pyproject.toml" for name in wheels.PACKAGES)]
    stated = {name: tomllib.loads((root / name).read_text("utf-8"))["project"]["version"] for name in names}
    for name in wheels.PACKAGES:
        module = f"packages/{name}/src/{name.replace('-', '_')}/__init__.py"
        found = re.search(r'^__version__ = "(\S+)"$', (root / module).read_text("utf-8"), re.MULTILINE)
        stated[module] = found.group(1) if found else "none"
    citation = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    return stated | {"CITATION.cff": citation.group(1) if citation else "none"}


def version_faults(stated: dict[str, str]) -> list[str]:
    """Return the files whose version differs from that of the workspace."""
    version = stated["pyproject.toml"]
    return [f"{name} must have version {version}, got {other}" for name, other in stated.items() if other != version]


def changelog_faults(text: str, version: str) -> list[str]:
    """Return a fault unless the changelog's newest section is `## VERSION (YYYY-MM-DD)`."""
    title = next(iter(re.findall(r"^## (.+)$", text, re.MULTILINE)), "none")
    if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title):
        return []
    return [f"the first section of CHANGELOG.md must be '{version} (YYYY-MM-DD)', got '{title}'"]


def tree_faults(status: str, tag: str, version: str) -> list[str]:
    """Return a fault for uncommitted changes, and for an existing tag."""
    changed = [f"not committed: {line[3:]}" for line in status.splitlines()]
    return changed + ([f"the tag v{version} is there"] if tag.strip() else [])


if __name__ == "__main__":
    main()
