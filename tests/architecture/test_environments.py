"""The two environments: what stage processes load is installed where they run, and what they share is equal."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHARED_COMPILER = ("numba", "llvmlite")
"""Machine code that one environment keeps beside the source is thrown away by another version in the other."""


def _extras_of(environment: str) -> list[str]:
    """Return the extras with which the installer makes an environment."""
    installer = (ROOT / "scripts/install.sh").read_text(encoding="utf-8")
    found = re.search(rf'install {re.escape(environment)} -e "\.\[([a-z0-9,-]+)\]"', installer)
    assert found is not None, environment
    return found.group(1).split(",")


def _direct(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the project and of some of its extras, each other's extras included."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    own = [Requirement(text) for text in texts if Requirement(text).name == "motley"]
    nested = [text for requirement in own for text in _direct(requirement.extras)]
    return [text for text in texts if Requirement(text).name != "motley"] + nested


def _closure(texts: Iterable[str]) -> set[str]:
    """Return the names of all distributions that requirements bring, as far as they are installed here."""
    found: set[str] = set()
    left = [Requirement(text) for text in texts]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        try:
            below = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # only the other environment has it
            continue
        left += [r for r in below if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_plan_stage_loads_only_what_the_engines_environment_brings() -> None:
    """Found by a clean installation: there the search's compiler came with vLLM alone, which not everybody installs."""
    code = (
        "import sys; before = set(sys.modules);"
        "import stages.planning, plans.search.warm_up, plans.cost.compiled.jit;"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    owners = packages_distributions()
    loaded = {canonicalize_name(owner) for module in done.stdout.split() for owner in owners.get(module, ())}
    assert {"numba", "numpy"} <= loaded
    brought = _closure(_direct(_extras_of(".venv-engines"))) | {"motley"}
    assert loaded - brought == set()


def test_both_environments_pin_the_same_compiler() -> None:
    pins = [
        dict(line.split("==") for line in (ROOT / "constraints" / name).read_text().split() if "==" in line)
        for name in ("airflow-py311.txt", "engines-py311.txt")
    ]
    for name in SHARED_COMPILER:
        assert pins[0][name] == pins[1][name], name
