"""What keeps the house tidy, and no other tool checks."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("data", "model", "train", "eval", "launch", "serve")
KERNELS = ("triton_lattice.py",)  # whose launches take what the kernel takes
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_classes_have_at_most_twelve_fields_and_calls_six_positional_arguments(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            assert len(fields) <= 12, f"{path.name}: {node.name}"
        if isinstance(node, ast.Call) and path.name not in KERNELS:
            assert len(node.args) <= 6, f"{path.name}:{node.lineno}"


def test_no_folder_of_model_has_more_than_nine_files():
    folders = [folder for folder in (ROOT / "model").rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    assert {folder.name: len([*folder.glob("*.py")]) for folder in folders if len([*folder.glob("*.py")]) > 9} == {}
    assert len(folders) >= 7


def test_links_that_are_checked_in_lead_to_what_is_checked_in():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    lines = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = [Path(line.split("\t")[1]) for line in lines.splitlines() if line.startswith("120000")]
    assert links
    for link in links:
        assert not (ROOT / link).readlink().is_absolute(), link
        assert (ROOT / link).resolve().relative_to(ROOT.resolve()).parts[0] in (*FOLDERS, "conf"), link
