"""The tests of this room work where temporary files usually lie, also when `infra/test` has the others in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path


def test_the_folder_of_a_test_is_where_temporary_files_lie(tmp_path):
    assert tmp_path.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev
