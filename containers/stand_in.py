"""Writes site-packages that say they hold what is recorded of NVIDIA's image: names, no code.

    python3 containers/stand_in.py containers/ngc-image.txt FOLDER

For `containers/add.py`, which looks at names and versions. As in the image, what is copied into it
from another one has no metadata: a folder is all that there is of cudf.
"""

import sys
from pathlib import Path

WITHOUT_METADATA = ("cudf", "dask_cudf", "dask_cuda")


def write(recorded: str, folder: Path) -> None:
    """A package per line ``name==version``."""
    for line in recorded.splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
            )
            (info / "RECORD").touch()
    for name in WITHOUT_METADATA:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()


if __name__ == "__main__":
    write(Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2]))
