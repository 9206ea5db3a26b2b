"""The marks of tests of kernels with `wgmma`."""

from __future__ import annotations

import pytest
import torch

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="wgmma"
    ),
]
