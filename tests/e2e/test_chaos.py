# SPDX-License-Identifier: MIT
"""A short run of the chaos driver, tests/chaos/chaos.py. EXPERTD_CHAOS names the seconds of a longer one."""
import os
import subprocess
import sys

import pytest

from conftest import BUILD, SLOW, TOP


@pytest.mark.slow
@pytest.mark.skipif(SLOW > 1 or not os.path.isdir("/dev/shm"), reason="times are judged: not in sanitizer builds")
def test_chaos(tmp_path):
    seconds = os.environ.get("EXPERTD_CHAOS", "8")
    r = subprocess.run([sys.executable, str(TOP / "tests/chaos/chaos.py"), "--seed", "1", "--seconds", seconds, "--patience",
                        "30", "--build", str(BUILD)], capture_output=True, text=True, timeout=float(seconds) * 2 + 300)
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-2000:]
    print(r.stdout)
