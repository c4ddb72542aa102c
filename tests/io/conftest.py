"""Fixtures of the tests of files."""

import pytest
from small_policies import config_of, random_params

from jaxspec.io import safetensors as st


@pytest.fixture
def folder(tmp_path):
    """A small policy as a Hugging Face folder."""
    config = config_of()
    return st.write_policy(tmp_path / "policy", config, random_params(config), dtype="float32")
