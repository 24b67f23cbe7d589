"""Build what pip installs: a folder of its own, laid out like the checkout, with the commit that it was built from.

A job mounts this folder into its container and puts it on PYTHONPATH. So it must hold no package but ours.
"""

import json
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = "cuda_graph_orchestrator"
ROOT = Path(__file__).resolve().parent


class BuildFolder(build_py):
    """Build into ``FOLDER``, which a .pth file next to it adds to Python's path. An editable install uses the checkout."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.build_lib = str(Path(self.build_lib, FOLDER))

    def run(self) -> None:
        if not self.editable_mode:
            # Otherwise the package would contain modules of an earlier build that have been deleted since.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self._add_data(Path(self.build_lib))

    def _add_data(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT))
        from launch.common.checkout import BUILT_FROM, describe_commit

        for name in ("recipes", "clusters"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / BUILT_FROM).write_text(json.dumps(describe_commit(ROOT)))
        (folder.parent / f"{FOLDER}.pth").write_text(f"{FOLDER}\n")


setup(cmdclass={"build_py": BuildFolder})
