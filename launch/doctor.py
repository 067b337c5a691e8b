"""What this machine offers a run: versions, devices, disk, W&B."""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from ctcdraft.eval.report import markdown_table

PACKAGES = (
    "ctcdraft",
    "torch",
    "transformers",
    "datasets",
    "deepspeed",
    "wandb",
    "hydra-core",
    "numba",
    "numpy",
)
NEEDED_GB = 5


def main() -> int:
    rows = [("python", sys.version.split()[0]), *((name, _version(name)) for name in PACKAGES)]
    rows += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    memory = psutil.virtual_memory()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    rows += [
        ("cpu cores", str(psutil.cpu_count())),
        ("memory", f"{memory.total / 2**30:.0f} GB, {memory.available / 2**30:.0f} GB free"),
        ("disk", f"{free:.0f} GB free here"),
    ]
    print(markdown_table(("what", "found"), rows))
    missing = [name for name, found in rows if found == "missing"]
    if missing:
        print(f"error: {', '.join(missing)} not installed: run `make setup`", file=sys.stderr)
    if free < NEEDED_GB:
        print(f"warning: less than {NEEDED_GB} GB of disk free", file=sys.stderr)
    return 1 if missing else 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
