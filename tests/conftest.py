"""For all tests: without a GPU, the GPU's kernels are run by Triton's interpreter, which must be told before anybody imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
