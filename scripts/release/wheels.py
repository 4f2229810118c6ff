"""Build a wheel of each package: `python scripts/release/wheels.py`, or `make wheels`.

Each wheel is built from a copy of the package's folder that also has the license and a self-contained README. With
--repository URL, the address of the sources on the web, the README links there at the tag of the version, and the
metadata include it; without it, those links become plain text.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
PACKAGES = ("omni-sched", "omni-losses", "omni-reward", "omni-rollout", "omni-train", "omni-rl")
SHORT = "OWNER/omni-rl"
ADDRESS = f"https://github.com/{SHORT}"  # of the sources in all pages, until they are hosted
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+://|#)([^)\s]+)\)")


def main() -> None:
    """Build the wheels selected on the command line, and print their paths."""
    parser = argparse.ArgumentParser(description="Build a wheel of each package.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument("--repository", default="", help="address of the sources on the web, for links and metadata")
    args = parser.parse_args()
    for wheel in build(args.out, PACKAGES, repository=args.repository):
        print(wheel)


def build(out: Path, packages: tuple[str, ...], *, repository: str = "") -> list[Path]:
    """Build a wheel of each package in the folder, and return their paths.

    Raises:
        ValueError: `repository` is not a web address.
        FileNotFoundError: uv is not found.
        subprocess.CalledProcessError: a package cannot be built; uv has printed the reason.
    """
    if repository and not re.fullmatch(r"https://[^\s/]+/\S+", repository):
        raise ValueError(f"repository must be an https address with a path, got {repository!r}")
    uv = shutil.which("uv") or shutil.which("uv", path=ROOT / ".tools" / "bin")
    if uv is None:
        raise FileNotFoundError("uv must be on the PATH or in .tools/bin: scripts/env puts it there")
    wheels = []
    for package in packages:
        metadata = (ROOT / "packages" / package / "pyproject.toml").read_text("utf-8")
        version = tomllib.loads(metadata)["project"]["version"]
        with tempfile.TemporaryDirectory() as folder:
            stage(package, Path(folder) / package, repository=repository.rstrip("/"), version=version)
            command = [uv, "build", "--quiet", "--wheel", "--no-sources", "--out-dir", str(out.resolve())]
            subprocess.run([*command, str(Path(folder) / package)], check=True)
        wheels.append(out / f"{package.replace('-', '_')}-{version}-py3-none-any.whl")
    return wheels


def stage(package: str, folder: Path, *, repository: str, version: str) -> None:
    """Copy a package to a new folder, with the license, a self-contained README, and its addresses."""
    source = ROOT / "packages" / package
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "dist"))
    shutil.copy(ROOT / "LICENSE", folder)
    readme, project = folder / "README.md", folder / "pyproject.toml"
    place = f"{repository}/blob/v{version}" if repository else ""
    text = by_name(hosted(readme.read_text("utf-8"), repository))
    readme.write_text(standing_alone(text, f"packages/{package}", place), "utf-8")
    metadata = project.read_text("utf-8").replace("\nauthors =", '\nlicense-files = ["LICENSE"]\nauthors =')
    if repository:
        pages = {
            "Source": repository,
            "Changelog": f"{place}/CHANGELOG.md",
            "Documentation": f"{place}/docs/quickstart.md",
        }
        urls = "".join(f'{name} = "{address}"\n' for name, address in pages.items())
        metadata += f"\n[project.urls]\n{urls}"
    project.write_text(metadata, "utf-8")


def hosted(text: str, repository: str) -> str:
    """Return the text of a page with the real address of the sources, also in Colab's address of a notebook."""
    colab = f"/github/{urlsplit(repository).path.strip('/')}"
    return text.replace(ADDRESS, repository).replace(f"/github/{SHORT}", colab) if repository else text


def by_name(text: str) -> str:
    """Return the text of a page with package names as on an index instead of folders of the clone to install."""
    return text.replace("./packages/*", PACKAGES[-1]).replace("./packages/", "")


def standing_alone(text: str, folder: str, place: str) -> str:
    """Return the text of a page of `folder` with relative links made absolute below `place`, or plain if it is empty.

    Code blocks are not changed.
    """

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        return f"[{words}]({place}/{posixpath.normpath(posixpath.join(folder, target))})" if place else words

    blocks = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else LINK.sub(link, block) for block in blocks)


if __name__ == "__main__":
    main()
