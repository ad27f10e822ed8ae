"""How a release was made, as a provenance statement (in-toto v1, SLSA v1) about the SHA-256 of its files.

The statement is not signed: no signing service belongs to this project. Whoever publishes a release signs it with a
key of their own, for example with `cosign attest-blob`, or lets the platform that builds it attest the same subjects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "urn:wherry:infra/release:1"  # infra/release on the files of one commit
_TAG = re.compile(r"v(\d+(?:\.\d+)+(?:(?:a|b|rc)\d+)?)")
_STATED = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def version_of(tags: Sequence[str], stated: str, commit_time: int) -> str:
    """The version of a commit: what the code states, if that is its tag (`v1.2.0`), else a development version of it.

    Neither the history nor other tags count, so a shallow clone gives the same. A tag of another version than the
    code is refused, so that what is installed from the commit in other ways has the version of the release.

    Args:
        tags: the tags of this very commit.
        stated: text of `wherry/version.py`.
        commit_time: seconds since 1970; it orders the development versions.

    Raises:
        ValueError: several tags are versions, or the code states none or another one.
    """
    tagged = sorted({found[1] for tag in tags if (found := _TAG.fullmatch(tag))})
    if len(tagged) > 1:
        raise ValueError(f"the commit has several versions: {', '.join(tagged)}")
    found = _STATED.search(stated)
    if found is None:
        raise ValueError("wherry/version.py states no version")
    if tagged and tagged[0] != found[1]:
        raise ValueError(f"the tag is v{tagged[0]}, but wherry/version.py states {found[1]}")
    return (
        tagged[0]
        if tagged
        else f"{found[1].removesuffix('.dev0')}.dev{datetime.fromtimestamp(commit_time, UTC):%Y%m%d%H%M%S}"
    )


def stamp_version(stated: str, version: str) -> str:
    """The text of `wherry/version.py` with a version."""
    return _STATED.sub(f'__version__ = "{version}"', stated, count=1)


def address_in(runner: Mapping[str, str]) -> str:
    """The address of the repository that a workflow of GitHub builds; empty elsewhere."""
    if "GITHUB_REPOSITORY" not in runner:
        return ""
    return "/".join(filter(None, [runner.get("GITHUB_SERVER_URL"), runner["GITHUB_REPOSITORY"]]))


def state_urls(project: str, address: str) -> str:
    """The text of `pyproject.toml` with the address of the repository, for the metadata of the packages.

    The project has no address of its own, so the file in the repository states none.

    Args:
        project: text of the file.
        address: of the repository, with https://.
    """
    return f"{project.rstrip()}\n\n[project.urls]\nRepository = {json.dumps(address)}\n"


def provenance(
    files: Sequence[Path], version: str, commit: str, made_with: Mapping[str, str], runner: Mapping[str, str]
) -> dict[str, Any]:
    """The statement about the files of a release.

    Args:
        files: they become its subjects.
        version: of the release.
        commit: full hash of the commit that was built.
        made_with: package → version, of what built it.
        runner: environment variables; those of GitHub name the workflow and the repository.
    """
    source = {"name": "source", "digest": {"gitCommit": commit}}
    repository = address_in(runner)
    if repository:
        source["uri"] = f"git+{repository}@{runner.get('GITHUB_REF', commit)}"
    tools = [{"uri": f"pkg:pypi/{name}@{number}"} for name, number in sorted(made_with.items())]
    details: dict[str, Any] = {
        "builder": {"id": runner.get("GITHUB_WORKFLOW_REF", "urn:wherry:builder:local")}
    }
    if "GITHUB_RUN_ID" in runner:
        details["metadata"] = {"invocationId": f"{repository}/actions/runs/{runner['GITHUB_RUN_ID']}"}
    return {
        "_type": STATEMENT,
        "subject": [{"name": file.name, "digest": {"sha256": _sha256(file)}} for file in sorted(files)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"command": "infra/release", "version": version},
                "resolvedDependencies": [source, *tools],
            },
            "runDetails": details,
        },
    }


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
