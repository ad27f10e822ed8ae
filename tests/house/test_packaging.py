"""The wheel, the sdist, an editable install and a plain clone give the same package, links or no links."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("flows", "tasks", "integrations")
# What a room may miss where no extra is installed. Pydantic comes with prefect.
EXTRAS = {"distributed", "mlflow", "prefect", "ray", "yaml"}  # PyYAML comes with Prefect

IMPORT_ALL = """
import importlib, json, sys
sys.path[:0] = sys.argv[1].split(":")
failed = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
    except Exception as error:
        missing = error.name if type(error) is ModuleNotFoundError else None
        if type(error).__name__ == "MissingExtraError":
            missing = str(error).partition("needs the package ")[2].split()[0]
        failed[name] = [missing, repr(error)]
import wherry
print(json.dumps([wherry.__file__, failed]))
"""


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(what: str, source: Path, into: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{what}", "--outdir", into, source)
    (built,) = into.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has or would take, links as links, as a clone would be."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a git checkout")
    folder = tmp_path_factory.mktemp("clone") / "wherry"
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", clone, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", clone, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to what a base install of wherry brings, and to nothing else."""
    folder = tmp_path_factory.mktemp("base")
    for name in sorted(base_distributions()):
        found = distribution(name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def base_distributions() -> set[str]:
    """The names of all distributions that wherry needs without extras, directly or indirectly."""
    known, waiting = set[str](), {"wherry"}
    while waiting:
        name = waiting.pop()
        try:
            wanted = [Requirement(line) for line in distribution(name).requires or ()]
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed, but the base install needs it")
        known.add(name)
        here = {**default_environment(), "extra": ""}
        waiting |= {need.name for need in wanted if not need.marker or need.marker.evaluate(here)} - known
    return known - {"wherry"}


def modules_on_disk(package: Path) -> set[str]:
    """Dotted names of the Python files below a package folder, links followed."""
    found = {path.relative_to(package.parent) for path in package.glob("*.py")}
    for room in (entry for entry in package.iterdir() if entry.is_dir()):
        real = room.resolve()  # rglob does not follow links
        found |= {Path(package.name, room.name) / path.relative_to(real) for path in real.rglob("*.py")}
    return {dotted(path) for path in found}


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def modules_in_wheel(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return [dotted(Path(name)) for name in names if name.endswith(".py")]


def test_the_wheel_holds_every_module_of_all_rooms_once(wheel: Path, clone: Path) -> None:
    modules = modules_in_wheel(wheel)
    assert len(modules) == len(set(modules))
    assert {name.split(".")[0] for name in modules} == {"wherry"}
    for room in ROOMS:
        real = {dotted(path.relative_to(clone)) for path in (clone / room).rglob("*.py")}
        assert real, f"{room} is empty"
        assert {f"wherry.{name}" for name in real} <= set(modules)
    assert set(modules) == modules_on_disk(clone / "wherry")


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_a_clone_without_links_builds_the_same_wheel(clone: Path, wheel: Path, tmp_path: Path) -> None:
    """A zip archive and a clone on Windows have no links."""
    shutil.copytree(clone, tmp_path / "zip", symlinks=True)
    for room in ROOMS:
        (tmp_path / "zip" / "wherry" / room).unlink()
    again = build("wheel", tmp_path / "zip", tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_licence_and_type_marker_are_shipped(sdist: Path, wheel: Path) -> None:
    shipped = zipfile.ZipFile(wheel).namelist()
    assert "wherry/py.typed" in shipped
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in shipped)
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "docs/README.md",
        "docs/reference/formats.md",
        "pyproject.toml",
        "infra/constraints.txt",
        "tests/house/test_packaging.py",
    } <= packed


def import_all(package: Path, base: Path, modules: set[str]) -> dict[str, list[str]]:
    """Import modules where only `package` and the base dependencies are visible; what failed and how."""
    path = f"{package}:{base}"
    said = run(sys.executable, "-I", "-S", "-c", IMPORT_ALL, path, json.dumps(sorted(modules)), cwd=base)
    where, failed = json.loads(said)
    assert Path(where).is_relative_to(package)
    return failed


def only_extras_are_missing(failed: dict[str, list[str]]) -> None:
    for name, (missing, what) in failed.items():
        assert name.split(".")[1] in ROOMS, f"{name} needs more than the base install: {what}"
        assert missing is not None, f"{name}: {what}"
        assert missing.split(".")[0] in EXTRAS, f"{name}: {what}"


def test_the_wheel_imports_with_the_base_dependencies_alone(installed: Path, base: Path, wheel: Path) -> None:
    failed = import_all(installed, base, set(modules_in_wheel(wheel)))
    only_extras_are_missing(failed)
    assert not any(name.startswith("wherry.integrations.formats") for name in failed)


def test_a_plain_clone_imports_the_same(clone: Path, base: Path, wheel: Path) -> None:
    only_extras_are_missing(import_all(clone, base, set(modules_in_wheel(wheel))))


def test_an_editable_install_points_to_the_clone(
    clone: Path, base: Path, wheel: Path, tmp_path: Path
) -> None:
    """Hatchling's editable wheel is one .pth file that names the folder above the package: new files show at once."""
    hook = f"import hatchling.build; print(hatchling.build.build_editable({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", hook, cwd=clone).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as editable:
        links = [entry for entry in editable.namelist() if entry.endswith(".pth")]
        assert [entry for entry in editable.namelist() if entry.endswith(".py")] == []
        (pointed,) = [editable.read(entry).decode().strip() for entry in links]
    assert Path(pointed) == clone
    only_extras_are_missing(import_all(Path(pointed), base, set(modules_in_wheel(wheel))))


def test_the_version_is_one(installed: Path, base: Path, wheel: Path) -> None:
    code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from wherry.cli import main; main(['--version'])"
    said = run(sys.executable, "-I", "-S", "-c", code, f"{installed}:{base}")
    assert said.split()[-1] == wheel.name.split("-")[1]


def test_the_wheel_has_what_deploy_and_the_example_of_a_configuration_need(
    wheel: Path, installed: Path, base: Path
) -> None:
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("wherry/packaged/")}
    files = ["prefect.yaml", "prefect.devices.yaml", "automations.yaml", "wherry.toml"]
    files += [f"pools/{path.name}" for path in (ROOT / "infra" / "pools").glob("*.json")]
    assert shipped == {f"wherry/packaged/{name}" for name in files}
    code = (
        "import sys; sys.path[:0] = sys.argv.pop(1).split(':')\n"
        "from wherry.config.package_data import package_path\n"
        "for name in ('prefect.yaml', 'pools', 'automations.yaml', 'wherry.toml'): print(package_path(name))"
    )
    found = run(sys.executable, "-I", "-S", "-c", code, f"{installed}:{base}").split()
    assert all(Path(path).is_relative_to(installed / "wherry" / "packaged") for path in found)
    assert all(Path(path).exists() for path in found)
    assert (installed / "wherry" / "nightly" / "first.toml").is_file()
