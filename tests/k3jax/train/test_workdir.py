"""A workdir serves one run at a time and is refused before any work when it cannot."""

import errno
import os
import subprocess
import sys

import pytest

from k3jax.train import workdir
from k3jax.train.workdir import opened


def test_a_second_run_is_refused_with_the_process_of_the_first(tmp_path):
    with opened(tmp_path / "new" / "run", print) as folder:
        with pytest.raises(ValueError, match=rf"in use by process {os.getpid()}.*--workdir"):
            with opened(folder, print):
                pass
    with opened(folder, print):
        pass


def test_a_killed_run_leaves_its_folder_free(tmp_path):
    script = (
        "import sys, os\n"
        "from k3jax.train.workdir import opened\n"
        "with opened(sys.argv[1], print):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    root = workdir.__file__.rsplit("/k3jax/", 1)[0]
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
    )  # fmt: skip
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"in use by process {other.pid}"):
        with opened(tmp_path, print):
            pass
    other.kill()
    other.communicate()
    with opened(tmp_path, print):
        pass


def test_a_file_system_without_locks_is_announced_and_used(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(workdir.fcntl, "flock", no_locks)
    said = []
    with opened(tmp_path, said.append):
        assert len(said) == 1 and "cannot be locked" in said[0]


def test_a_file_is_no_workdir(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        with opened(tmp_path / "run", print):
            pass
