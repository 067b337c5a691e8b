"""Where configuration enters: the command line, composed by Hydra, checked, and turned into dataclasses.

Whatever a user got wrong ends here as one sentence and a non-zero exit; CTCDRAFT_TRACEBACK=1 shows where
it was raised. Hydra's own flags (--help, --cfg job, --multirun ...) work as everywhere.
"""

import atexit
import difflib
import io
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib import resources
from typing import Any, NoReturn, TypeVar

import hydra
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from ctcdraft.data.secrets import masked

from .schema import store_defaults

CONF = "ctcdraft.conf"
INTERRUPTED = 130  # what a shell gives for Ctrl-C
RANK_0_SECONDS = 5.0  # that other ranks leave it to say what all of them have found
LESS_MEMORY = " (take base.dtype=bf16, or less of train.micro_batch, train.max_length or data.batch_size)"
LOCAL_RANK = re.compile(r"--local[_-]rank")
Entry = TypeVar("Entry")

store_defaults()


class Stopped(int):
    """The exit code of a command that was asked to stop: of several, no other is begun."""


def run(config_name: str, schema: type[Entry], task: Callable[[Entry], int]) -> NoReturn:
    """`enter`, and the end of the process as `multiprocessing` ends its own: what was registered for it is done, but
    torch's objects are not taken apart one by one, which would take another second."""
    code: Any = 0
    try:
        enter(config_name, schema, task)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def enter(config_name: str, schema: type[Entry], task: Callable[[Entry], int]) -> None:
    """Compose `config_name` with the command line's overrides, run `task` on it, exit with its code."""
    # The deepspeed launcher puts --local_rank=N first; the rank is read from the environment.
    words = [_quoted(word) for word in sys.argv[1:] if not LOCAL_RANK.match(word)]
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {masked(str(message))}", file=sys.stderr)
    sys.argv[1:] = masked(words)  # W&B writes down the command
    if not any(word.startswith("-") for word in words):
        sys.exit(_guarded(lambda: task(typed(compose(config_name, words), schema))))
    codes, ours, hydras = [0], sys.stdout, io.StringIO()

    def run(config: DictConfig) -> None:
        sys.argv[1:] = masked(words)
        with redirect_stdout(ours):
            codes.append(_guarded(lambda: task(typed(config, schema))))
        if isinstance(codes[-1], Stopped):
            sys.exit(codes[-1])

    sys.argv[1:] = words
    try:
        with redirect_stdout(hydras):
            hydra.main(config_path=f"pkg://{CONF}", config_name=config_name, version_base="1.3")(run)()
    finally:
        print(masked(hydras.getvalue()), end="")  # --cfg prints the options that were given
    sys.exit(max(codes))


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The composed configuration. Raises ValueError, in one sentence, on a bad override."""
    with hydra.initialize_config_module(CONF, version_base="1.3"):
        try:
            return hydra.compose(config_name, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_override_sentence(config_name, overrides, error)) from error
        except Exception as error:  # what Hydra's own code stumbles over: a number where a group's choice belongs
            given = _short(" ".join(overrides))
            raise ValueError(f"the options {given} cannot be read ({_short(error)}): check their types") from error


def typed(config: DictConfig, schema: type[Entry]) -> Entry:
    """The configuration as frozen dataclasses. Raises ValueError, in one sentence, on a wrong type."""
    try:
        given = OmegaConf.to_container(config, resolve=True)
        return TypeAdapter(schema).validate_python(given)
    except OmegaConfBaseException as error:
        raise ValueError(_short(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = _option_at(first["loc"], given)
        if first["type"] == "value_error":
            raise ValueError(str(first["ctx"]["error"])) from error
        if first["type"] == "unexpected_keyword_argument":
            raise ValueError(f"{where}: there is no such option") from error
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"{where}={_short(first['input'], 80)}: {message}") from error


def _option_at(loc: Sequence[Any], given: Any) -> str:
    """The option that pydantic's `loc` is about: without the kinds that it names on the way."""
    parts = []
    for part in loc:
        if isinstance(given, dict) and part not in given and part != loc[-1]:
            continue
        parts.append(str(part))
        given = given.get(part) if isinstance(given, dict) else given[part] if isinstance(given, list) else None
    return ".".join(parts)


def options_in(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a configuration and of all within it."""
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from options_in(value, f"{prefix}{name}.")


def _options(config_name: str, choices: Sequence[str] = ()) -> dict[str, Any]:
    composed: Any = OmegaConf.to_container(hydra.compose(config_name, list(choices)), resolve=False)
    return dict(options_in(composed))


def _quoted(word: str) -> str:
    """A word as Hydra's grammar wants it: `zero=2` names a choice of a group and `name=1e3` a run, where Hydra would
    read a number; the name of a file that is there is no syntax: `data.path=chats (1).jsonl`; nor is what has none:
    `base.eos=<|im_end|>`; nor what is said: `prompt=Hello, world`."""
    key, equals, value = word.partition("=")
    quoted = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    if key in ("prompt", "system") and value != "null":
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", quoted)  # no interpolation
    choice = value.isdecimal() and key.isidentifier() and resources.files(CONF).joinpath(key).is_dir()
    text = key == "name" and re.match(r"[-+.\d]", value)
    if choice or text or os.path.exists(os.path.expanduser(value)):
        return quoted
    if not equals or _parses(word):
        return word
    if value.startswith("[") and value.endswith("]"):
        return f"{key}=[{','.join(_quoted(f'{key}={part}')[len(key) + 1 :] for part in value[1:-1].split(','))}]"
    return quoted


def _parses(word: str) -> bool:
    with suppress(HydraException):
        return bool(OverridesParser.create().parse_override(word))
    return False


def _guarded(task: Callable[[], int]) -> int:
    try:
        return task()
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if os.environ.get("CTCDRAFT_TRACEBACK"):
            raise
        if os.environ.get("RANK", "0") != "0":  # who starts ranks ends all of them with the first: rank 0 is to say it
            time.sleep(RANK_0_SECONDS)
        advice = LESS_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
        print(f"error: {masked(' '.join(str(error).split()))}{advice}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Stopped(INTERRUPTED)


def _override_sentence(config_name: str, overrides: Sequence[str], error: Exception) -> str:
    text = str(error)
    if key := re.search(r"Could not override '([^']+)'", text):
        known = _options(config_name)
        if key[1] in known:
            return f"{key[1]}: what else was chosen has no such option (--cfg job shows those it has)"
        choices = [word for word in overrides if not re.match(rf"\+*([^=]*\.|{re.escape(key[1])}=)", word)]
        with suppress(HydraException, OmegaConfBaseException):  # of another misspelt one: the default's will do
            known = _options(config_name, choices)
        close = difflib.get_close_matches(key[1], known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--cfg job shows all options"
        return f"{key[1]}: there is no such option; {hint}"
    if choice := re.search(r"Could not find '([^']+)/([^']*)'", text):
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        return f"{choice[1]}={choice[2]}: there is no such choice; choose one of {', '.join(options)}"
    return _short(error)


def _short(said: Any, longest: int = 300) -> str:
    """One line of what was said, not too long; for an error that says nothing, its name."""
    line = " ".join(str(said).split()) or type(said).__name__
    return line if len(line) <= longest else f"{line[:longest]} ..."
