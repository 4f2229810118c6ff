"""Wheels hold all of a package and stand alone; a release is refused where the tree is not ready for one."""

import os
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message

import pytest
import release
import wheels
from helpers import REPO
from packaging.requirements import Requirement

REPOSITORY = "https://forge.example/someone/omni-rl"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, zipfile.ZipFile]:
    """The wheel of each package, built with an address."""
    paths = wheels.build(tmp_path_factory.mktemp("dist"), wheels.PACKAGES, repository=REPOSITORY)
    return {name: zipfile.ZipFile(path) for name, path in zip(wheels.PACKAGES, paths, strict=True)}


def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_string(
        wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    )


def test_a_wheel_holds_every_file_of_its_package_and_the_license(built):
    for package, wheel in built.items():
        source = f"packages/{package}/src"
        listed = subprocess.run(
            ["git", "ls-files", source], cwd=REPO, capture_output=True, text=True, check=True
        ).stdout
        files = {name.removeprefix(f"{source}/") for name in listed.split() if (REPO / name).is_file()}
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        assert files - names == set()
        assert f"{package.replace('-', '_')}/py.typed" in names
        (license_text,) = (wheel.read(name).decode() for name in names if name.endswith("/licenses/LICENSE"))
        assert license_text == (REPO / "LICENSE").read_text("utf-8")


def test_the_wheel_begins_to_train_in_an_empty_folder(built, tmp_path):
    built["omni-rl"].extractall(tmp_path / "site")
    words = "train flowgrpo --preset tiny-signs --dry-run --check"
    command = [sys.executable, "-m", "omni_rl.tools.command", *words.split()]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.stderr == ""
    settings = tomllib.loads(result.stdout)
    assert settings["algo"] == "flowgrpo-cps"
    assert settings["model"] == str(tmp_path / "site/omni_rl/shipped/checkpoints/tiny-signs-qwen-image")
    asked = [sys.executable, "-c", "from omni_rl.tools.command import trainers; print(*trainers().values())"]
    places = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True).stdout.split()
    assert all(place.startswith(str(tmp_path / "site")) for place in places)
    assert len(places) == len(list((REPO / "apps").glob("train_*.py")))


def test_metadata_says_what_an_index_shows(built):
    for package, wheel in built.items():
        project = tomllib.loads((REPO / "packages" / package / "pyproject.toml").read_text("utf-8"))["project"]
        told = metadata(wheel)
        assert (told["Name"], told["Version"], told["Summary"]) == (package, project["version"], project["description"])
        assert (told["License-Expression"], told["License-File"]) == ("Apache-2.0", "LICENSE")
        assert told["Author"] == "The omni-rl authors"
        assert told["Description-Content-Type"] == "text/markdown"
        assert len(told["Keywords"].split(",")) >= 5
        classifiers = told.get_all("Classifier")
        assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
        assert not [name for name in classifiers if name.startswith("License ::")], "the expression says it"
        needs = {str(Requirement(text)) for text in told.get_all("Requires-Dist") if "extra ==" not in text}
        assert needs == {str(Requirement(text)) for text in project["dependencies"]}
        assert told.get_all("Project-URL") == [
            f"Source, {REPOSITORY}",
            f"Changelog, {REPOSITORY}/blob/v0.1.0/CHANGELOG.md",
            f"Documentation, {REPOSITORY}/blob/v0.1.0/docs/quickstart.md",
        ]


def test_a_wheels_readme_installs_packages_by_name_and_says_how_to_have_torch_for_cpus(built):
    for package, wheel in built.items():
        text = metadata(wheel).get_payload()
        installed = [line.split() for line in text.splitlines() if line.startswith("    pip install ")]
        assert any(word.strip('"').partition("[")[0] == package for line in installed for word in line), package
        assert "packages/" not in " ".join(word for line in installed for word in line)
        assert ("CPU wheel" in text) == (package != "omni-reward")
        assert wheels.ADDRESS not in text


def test_no_link_of_a_wheels_readme_needs_the_repository_around_it(built, tmp_path):
    (path,) = wheels.build(tmp_path, ("omni-reward",))
    alone, found = zipfile.ZipFile(path), []
    assert metadata(alone).get_all("Project-URL") is None
    for package, wheel in [*built.items(), ("omni-reward", alone)]:
        text = metadata(wheel).get_payload()
        blocks = text.split("```")[::2]
        found += [target for block in blocks for _, target in wheels.LINK.findall(block)]
        assert f"# {package}" in text
    assert found == []
    assert f"[the protocol]({REPOSITORY}/blob/v0.1.0/docs/reward-protocol.md)" in (
        metadata(built["omni-reward"]).get_payload().lower()
    )


def test_all_files_state_one_version_and_another_is_named():
    stated = release.stated_versions(REPO)
    assert len(stated) == 14
    assert release.version_faults(stated) == []
    stated["CITATION.cff"] = "0.0.9"
    assert release.version_faults(stated) == ["CITATION.cff must have version 0.1.0, got 0.0.9"]


@pytest.mark.parametrize(
    ("title", "ready"),
    [("0.1.0 (2026-12-01)", True), ("Unreleased", False), ("0.1.0", False), ("0.1.1 (2026-12-01)", False)],
)
def test_a_release_has_its_section_in_the_changelog(title: str, ready: bool):
    assert (release.changelog_faults(f"# Changelog\n\n## {title}\n\n## 0.0.9 (2026-01-01)\n", "0.1.0") == []) == ready


def test_a_tree_that_is_not_ready_is_not_released(tmp_path, monkeypatch):
    asked, answers = [], {"status": "?? new.py\n", "tag": "", "rev-parse": "abc1234\n"}
    monkeypatch.setattr(release, "git", lambda *words: asked.append(words) or answers[words[0]])
    monkeypatch.setattr(sys, "argv", ["release.py", "--dry-run", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"release: not committed: new\.py"):
        release.main()
    assert list(tmp_path.iterdir()) == []
    assert ("tag", "--list", "v0.1.0") in asked
    assert not [words for words in asked if "--annotate" in words]
