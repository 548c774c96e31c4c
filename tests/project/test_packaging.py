"""Tests that the version, the lock file and the typed packages agree."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

import checkout
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import autopar.version

PROJECT = checkout.pyproject()["project"]


def locked() -> dict[str, Version]:
    """The version of each distribution in requirements.lock."""
    lock = (checkout.ROOT / "requirements.lock").read_text()
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.M)
    return {canonicalize_name(name): Version(version) for name, version in pins}


def declared() -> Iterator[Requirement]:
    """All requirements of pyproject.toml except the compilers of accelerators.

    The compilers are large and the suite does not need them. If one is installed, JAX
    looks for devices. So the environment of the lock file has none.
    """
    extras = PROJECT["optional-dependencies"]
    yield from map(Requirement, PROJECT["dependencies"])
    for group in (
        *(found for name, found in extras.items() if not name.endswith("-compiler")),
        *checkout.pyproject()["dependency-groups"].values(),
        checkout.pyproject()["build-system"]["requires"],
    ):
        yield from map(Requirement, group)


@pytest.mark.parametrize("requirement", list(declared()), ids=str)
def test_the_lock_satisfies(requirement: Requirement) -> None:
    version = locked()[canonicalize_name(requirement.name)]

    assert requirement.specifier.contains(version)


def test_every_pin_has_hashes() -> None:
    lock = (checkout.ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=\w)", lock, flags=re.M)[1:]

    assert len(entries) == len(locked())
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_tested_versions_are_the_locked_ones() -> None:
    """The suite runs in the environment that requirements.lock describes."""
    runtime = {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, PROJECT["dependencies"])
    }
    installed = {name: Version(importlib.metadata.version(name)) for name in runtime}

    assert installed == {name: locked()[name] for name in runtime}


def test_the_version_is_a_release() -> None:
    assert not Version(autopar.version.__version__).is_prerelease


def test_the_changelog_has_unreleased_or_this_version() -> None:
    changelog = (checkout.ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.M)

    assert headings[0] in {"Unreleased", autopar.version.__version__}


@pytest.mark.parametrize("package", checkout.SOURCES)
def test_packages_are_typed(package: str) -> None:
    assert (checkout.SOURCES[package] / "py.typed").is_file()


def test_the_wheel_holds_the_layers() -> None:
    """The wheel contains all layers and nothing else."""
    wheel = checkout.pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert {checkout.ROOT / package for package in wheel["packages"]} == set(
        checkout.SOURCES.values()
    )


def test_the_scripts_exist() -> None:
    for target in PROJECT["scripts"].values():
        package, _, rest = target.partition(".")
        module = rest.partition(":")[0]
        found = checkout.SOURCES[package] / module
        assert found.with_suffix(".py").is_file() or found.is_dir()
