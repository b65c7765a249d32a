"""Processes of another user of this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def as_another_user() -> list[str]:
    """Return the beginning of a command line that runs Python as the user ``nobody``, without this project's packages.

    Skips the test where this user can start no process of another one: as root, with ``setpriv``; else with ``sudo``
    that needs no password, as GitHub's runners have it.
    """
    python = next(path for path in ("/usr/bin/python3", sys.executable) if Path(path).exists())
    if os.getuid() == 0 and shutil.which("setpriv"):
        return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python]
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return ["sudo", "-n", "-u", "#65534", python]
    pytest.skip("this user can start no process of another user: neither root, nor sudo without a password")
