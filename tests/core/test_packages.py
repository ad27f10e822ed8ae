"""What is installed is told as `importlib.metadata` tells it, from folders of metadata alone."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder

import pytest

from wherry.core.packages import has_entry_points, version_of
from wherry.core.receipt import _REPORTED

PLUG_IN = """
from wherry.formats.format import Format, Holds
FORMAT = Format("acme", "Acme", lambda glimpse: None, lambda location, detection: None, holds=Holds(frozenset()))
"""


def installed(folder, name, version, entry_points=""):
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\ntext\n")
    if entry_points:
        (place / "entry_points.txt").write_text(entry_points)
    return place


@pytest.mark.parametrize("package", [*_REPORTED, "absent_package"])
def test_the_version_of_a_package(package):
    try:
        expected = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        expected = None
    assert version_of(package) == expected


def test_the_first_package_on_the_path_counts(tmp_path, monkeypatch):
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        installed(tmp_path / name, "acme_tool", f"{number}.0+local")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "b"), str(tmp_path / "a")])
    assert version_of("acme_tool") == importlib.metadata.version("acme_tool") == "1.0+local"


def test_a_package_of_the_former_form_has_a_version(tmp_path, monkeypatch):
    (tmp_path / "acme_tool-3.egg-info").mkdir()
    (tmp_path / "acme_tool-3.egg-info" / "PKG-INFO").write_text("Name: acme_tool\nVersion: 3\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version_of("acme_tool") == "3"


def test_entry_points_of_a_group(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "absent")])
    # Without what other packages look for, such as the backport of importlib.metadata.
    finders = [one for one in sys.meta_path if one is PathFinder or not hasattr(one, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", finders)
    place = installed(tmp_path, "acme", "1", "[wherry.formats]\nacme = acme:FORMAT\n")
    assert has_entry_points("wherry.formats")
    assert not has_entry_points("other.group")
    (place / "entry_points.txt").unlink()
    assert not has_entry_points("wherry.formats")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("acme-1.dist-info/entry_points.txt", "[wherry.formats]\nacme = acme:FORMAT\n")
    sys.path.append(str(tmp_path / "archive.zip"))
    assert has_entry_points("other.group"), "what an archive has is left to importlib.metadata"


def test_the_format_of_a_package_is_found(tmp_path):
    installed(tmp_path, "acme", "1", "[wherry.formats]\nacme = acme:FORMAT\n")
    (tmp_path / "acme.py").write_text(PLUG_IN)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from wherry.cli import main; main(['formats', 'acme'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Acme" in done.stdout
