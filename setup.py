"""Lists the packages; everything else is in pyproject.toml.

The rooms kernels/, model/, cli/ and bench/ lie beside cupaged/ in the checkout and install inside it. A package is a
folder with an __init__.py, so a new one needs no entry here.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOMS = {
    "cupaged": "cupaged",
    "cupaged.kernels": "kernels",
    "cupaged.model": "model",
    "cupaged.cli": "cli",
    "cupaged.bench": "bench",
}
here = Path(__file__).resolve().parent
present = {name: folder for name, folder in ROOMS.items() if (here / folder / "__init__.py").is_file()}
packages = [
    package
    for name, folder in present.items()
    for package in [name, *(f"{name}.{sub}" for sub in find_packages(str(here / folder)))]
]
setup(packages=packages, package_dir=present)
