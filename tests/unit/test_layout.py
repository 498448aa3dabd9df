"""The house keeps its shape: which folders are packages, which way imports point, where each big dependency lives."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "forge": ROOT / "forge",
    "evaluators": ROOT / "evaluators",
    "hypotheses": ROOT / "hypotheses",
    "forge_kernels": ROOT / "kernels" / "forge_kernels",
}
ARROWS = {
    "forge": {"evaluators", "hypotheses", "forge_kernels"},
    "evaluators": {"forge_kernels"},
    "hypotheses": set(),
    "forge_kernels": set(),
}
HOMES = {
    "sqlalchemy": ("hypotheses/ledger/",),
    "openai": ("forge/proposers/",),
    "transformers": ("evaluators/",),
    "datasets": ("evaluators/",),
    "triton": ("kernels/forge_kernels/",),
}


def imports(path: Path) -> set[str]:
    """Return the roots of everything a file imports, at any depth of the file."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def sources() -> list[tuple[str, Path]]:
    return [(name, path) for name, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]


def test_kernels_is_a_plain_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_of_this_repository_shadows_nothing() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_resolve_to_this_repository(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == PACKAGES[name], f"{name} is imported from {spec.origin}"


def test_imports_follow_the_arrows() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for name, path in sources()
        for other in sorted(imports(path) & (set(PACKAGES) - {name} - ARROWS[name]))
    ]
    assert wrong == []


@pytest.mark.parametrize("dependency", HOMES)
def test_big_dependencies_stay_at_home(dependency: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for _, path in sources()
        if dependency in imports(path) and not str(path.relative_to(ROOT)).startswith(HOMES[dependency])
    ]
    assert wrong == []


def test_programs_import_what_programs_may() -> None:
    for path in sorted((ROOT / "forge" / "programs").glob("*.py")):
        assert imports(path) <= {"torch", "math", "forge_kernels"}, path.name


def test_nothing_is_unpickled() -> None:
    wrong = [str(path.relative_to(ROOT)) for _, path in sources() if {"pickle", "dill", "cloudpickle"} & imports(path)]
    assert wrong == []
