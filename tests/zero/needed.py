"""What tests of DeepSpeed need."""

from __future__ import annotations

import pytest

from windlass.core.optional import is_available

needs_deepspeed = pytest.mark.skipif(
    not is_available("deepspeed"), reason="needs DeepSpeed: pip install 'windlass-trainer[deepspeed]'"
)
