"""Four ways to have cupaged: a wheel, `pip install .`, `pip install -e .`, a checkout that is not installed."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "cupaged": "cupaged",
    "kernels": "cupaged/kernels",
    "model": "cupaged/model",
    "cli": "cupaged/cli",
    "bench": "cupaged/bench",
}
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]

CHECK = """
import importlib, pathlib, pkgutil, cupaged, cupaged.kernels, cupaged.model, cupaged.cli
for package in (cupaged.kernels, cupaged.model, cupaged.cli):
    assert importlib.import_module(package.__name__) is package
names = [m.name for room in (cupaged.kernels, cupaged.model) for m in pkgutil.iter_modules(room.__path__)]
assert "interface" in names and "config" in names, names
from cupaged.kernels.interface import TILE
print(cupaged.__version__, pathlib.Path(cupaged.__file__).parent)
"""


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def copy_checkout(target: Path) -> Path:
    """A copy to build from: building in place leaves build/ behind, whose stale files go into the next wheel."""
    return shutil.copytree(ROOT, target, ignore=NOT_SOURCE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checkout = copy_checkout(folder / "checkout")
    subprocess.run([*PIP, "wheel", *OFFLINE, "-w", str(folder), str(checkout)], check=True)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_every_file_of_the_rooms(wheel: Path) -> None:
    expected = {
        f"{home}/{path.relative_to(ROOT / room).as_posix()}"
        for room, home in ROOMS.items()
        for pattern in ("*.py", "*.cu", "*.cuh", "py.typed")
        for path in (ROOT / room).rglob(pattern)
    }
    assert "cupaged/py.typed" in expected and "cupaged/kernels/interface.py" in expected
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    tree = ast.parse((ROOT / "cupaged" / "__init__.py").read_text())
    (version,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.targets[0].id == "__version__"
    )
    assert f"\nVersion: {version}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    (scripts,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "cupaged = cupaged.cli:main" in scripts


def test_the_cpu_requirements_are_the_dependencies_without_cupy() -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    dependencies = [text for text in project()["dependencies"] if not Requirement(text).name.startswith("cupy")]
    assert listed == dependencies


def test_cupy_is_asked_for_where_it_has_wheels() -> None:
    (cupy,) = (Requirement(text) for text in project()["dependencies"] if text.startswith("cupy"))
    assert cupy.marker is not None
    asked = [cupy.marker.evaluate({"sys_platform": name}) for name in ("linux", "win32", "darwin")]
    assert asked == [True, True, False]


def environment(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one, by a .pth file, but not its .pth files: no hook of
    an editable install of cupaged comes along."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = outside([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], folder)
    (Path(site.strip()) / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def outside(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command away from the checkout and without its paths; returns stdout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["wheel", "folder", "editable"])
def test_installed(way: str, wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    checkout = copy_checkout(tmp_path / "checkout")
    what = {"wheel": [str(wheel)], "folder": [str(checkout)], "editable": ["-e", str(checkout)]}[way]
    pip = [*PIP, "--python", str(python), "install", "--ignore-installed", *OFFLINE]
    outside([*pip, *what], tmp_path)
    version, folder = outside([str(python), "-c", CHECK], tmp_path).split()
    assert version == project_version(wheel)
    home = checkout / "cupaged" if way == "editable" else tmp_path / "venv"
    assert home.resolve() in (Path(folder).resolve(), *Path(folder).resolve().parents)
    for command in ([str(python.with_name("cupaged"))], [str(python), "-m", "cupaged"]):
        assert outside([*command, "--version"], tmp_path) == f"cupaged {version}\n"
    if way == "editable":  # a module made later is there without another install
        (checkout / "kernels" / "added.py").write_text("VALUE = 7\n")
        assert outside([str(python), "-c", "from cupaged.kernels.added import VALUE; print(VALUE)"], tmp_path) == "7\n"


def project_version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def test_a_checkout_needs_no_install(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    python = sys.executable
    _, folder = outside([python, "-c", CHECK], tmp_path, PYTHONPATH=str(checkout)).split()
    assert Path(folder) == checkout / "cupaged"
    assert outside([python, "-m", "cupaged", "--version"], tmp_path, PYTHONPATH=str(checkout)).startswith("cupaged ")


@pytest.mark.slow
def test_make_installs_without_cupy_where_it_is_told_to(tmp_path: Path) -> None:
    """The way of requirements-cpu.txt on a fresh machine, from the package index; a second make has nothing to do."""
    checkout = copy_checkout(tmp_path / "checkout")
    make = ["make", "-C", str(checkout), "GPU=0", f"VENV={tmp_path / 'venv'}", "install"]
    outside(make, tmp_path)
    facts = json.loads(outside([str(tmp_path / "venv" / "bin" / "cupaged"), "info", "--json"], tmp_path))
    assert "numba" in facts["versions"] and not [name for name in facts["versions"] if name.startswith("cupy")]
    assert "Nothing to be done" in outside(make, tmp_path)


def test_make_says_in_one_line_that_python_is_missing(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "touch"):
        (tools / name).symlink_to(shutil.which(name))
    command = [shutil.which("make"), "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", "install"]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cupaged needs Python 3.11 or newer") and not (tmp_path / "venv").exists()


def test_no_cupy_is_no_obstacle(tmp_path: Path) -> None:
    """Where CuPy is missing (requirements-cpu.txt), everything that needs no GPU is importable."""
    code = "import sys; sys.modules['cupy'] = None\nimport cupaged.device, cupaged.cli.app\nfrom cupaged import LLM"
    outside([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(ROOT))
