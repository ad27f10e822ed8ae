"""Ray is too large for the environment of the tests: its carrier is tested in one of its own, with --slow."""

from __future__ import annotations

import os
import subprocess
import sysconfig

import pytest

from tests.support.generations import ROOT, old_python


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_carrier_of_ray_keeps_the_contract(tmp_path):
    python = old_python("ray")
    places = [str(ROOT), sysconfig.get_paths()["purelib"]]
    command = [python, "-m", "pytest", "-q", "-k", "ray", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'made'}",
               "tests/workers/test_carriers.py", "tests/workers/test_ray.py"]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
