"""For all tests: without a GPU, the GPU's kernels are run by Triton's interpreter, which must be told before anybody imports it.
And a shell that starts the tests in the background has them ignore Ctrl-C, which some are about."""

import os
import signal

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Whole commands, processes, pages, pictures and long searches: as files `make quick` leaves them out.
SLOW = {
    *("test_bench.py", "test_bounds_run.py", "test_cli_partition.py", "test_extras.py", "test_flower.py", "test_flower_cli.py"),
    *("test_flower_privacy.py", "test_flower_processes.py", "test_flower_ray.py", "test_fuzz.py", "test_long_haul.py"),
    *("test_real_data.py", "test_report.py", "test_report_browser.py", "test_reproduce.py", "test_resume.py", "test_tools.py"),
    *("test_trackers.py",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker("slow")
