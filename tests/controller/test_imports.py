"""The controller without torch, without numba, and from a package that cannot be written to."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_python(code: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_deciding_loads_neither_torch_nor_numba_and_observing_no_torch():
    run_python(
        """
        import sys
        from sagc_fast.controller import SAGC, SAGCConfig
        controller = SAGC(SAGCConfig(), seed=0)
        assert controller.decide() == 4
        controller.state_dict(), controller.gauges()
        assert "torch" not in sys.modules and "numba" not in sys.modules
        controller.observe([[1, 2, 3, 9]])
        assert "torch" not in sys.modules and "numba" in sys.modules
        """
    )


def test_without_numba_the_twin_takes_over_and_says_so_once():
    output = run_python(
        """
        import sys
        sys.modules["numba"] = None
        from sagc_fast.controller import SAGC, SAGCConfig
        from sagc_fast.errors import ConfigError
        for seed in range(3):
            controller = SAGC(SAGCConfig(), seed=seed)
            for _ in range(3):
                controller.observe([[1, 2, 3, 9]] * 4)
            assert controller.gauges()["backend"] == "python"
        try:
            SAGC(backend="numba").observe([[1, 2]])
        except ConfigError as error:
            assert "install numba" in str(error)
        else:
            raise SystemExit("a required numba was not missed")
        """
    )
    assert output.count("numba cannot be imported") == 1


def test_the_cache_moves_to_the_users_folder_when_the_package_is_read_only(tmp_path):
    """With no writable folder at all the controller still compiles, and says that it does so in every process."""
    import sagc_fast

    package = Path(sagc_fast.__file__).parent
    copy = tmp_path / "site" / "sagc_fast"
    for source in [*package.glob("*.py"), *package.glob("controller/*.py")]:
        target = copy / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (copy / "controller" / "__pycache__").write_text("a file where the cache folder would go")
    code = f"""
        import logging
        logging.basicConfig(level=logging.INFO)
        import sagc_fast.controller
        assert sagc_fast.__file__.startswith({str(tmp_path)!r}), sagc_fast.__file__
        from sagc_fast.controller import _jit
        assert _jit._smooth(1.0, 2.0, False) == 0.9 * 1.0 + (1.0 - 0.9) * 2.0  # the smallest of the compiled functions
    """
    home = tmp_path / "home"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(home)}
    run_python(code, tmp_path, XDG_CACHE_HOME=str(home / "cache"), **environment)
    assert list(home.rglob("_jit*.nbi"))
    nowhere = tmp_path / "a file, not a folder"
    nowhere.write_text("")
    output = run_python(code, tmp_path, XDG_CACHE_HOME=str(nowhere), **environment)
    assert "cannot be kept on disk" in output
