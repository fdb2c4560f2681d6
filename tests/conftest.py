"""For all tests: without a GPU, the GPU's kernels are run by Triton's interpreter, which must be told before anybody imports it.
And a shell that starts the tests in the background has them ignore Ctrl-C, which some are about."""

import os
import signal

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
