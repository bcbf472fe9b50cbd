"""Imports go down only, and nothing unusual hides in the tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "rpadiag").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
LONGEST_MODULE = 400
LONGEST_FUNCTION = 70  # lines, docstring and signature included
LONGEST_KERNEL = 110


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_follow_the_direction_of_the_design() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_folder_is_not_an_importable_package() -> None:
    """A top-level ``kernels`` package would shadow the Hugging Face library that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_module_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_MODULE
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > (LONGEST_KERNEL if is_kernel(node) else LONGEST_FUNCTION)
        and not is_command(path, node)
    ]
    assert long == []


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel's state is its local variables: a loop cannot be moved out of it without handing over all of them."""
    return any(ast.unparse(d) == "triton.jit" for d in node.decorator_list)


def is_command(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's function is mostly its options, one after another."""
    return path.parent.name == "cli" and node.name == path.stem


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_no_module_is_named_after_nothing() -> None:
    assert [named(p) for p in SOURCES if p.stem in {"utils", "util", "helpers", "manager", "common", "misc"}] == []


def test_only_the_command_line_uses_typer_and_rich() -> None:
    users = [
        named(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if {"typer", "rich"} & {name.split(".")[0] for name in imported(node)}
        and "cli" not in path.relative_to(ROOT).parts
    ]
    assert users == []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
