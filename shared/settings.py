"""Every setting of every process, in one place.

A setting is a flag (`--max-num-seqs 64`), an environment variable (`SPLITFLAP_MAX_NUM_SEQS=64`) or
a line of a TOML file (`max_num_seqs = 64`, named by `--config` or SPLITFLAP_CONFIG). Flags win over
the environment, the environment over the file. One file and one environment may serve all
processes: each takes what is its own, and a name that is nobody's is refused. Names follow vLLM's
where it has one.
"""

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.errors import StartError
from shared.flags import HIDDEN, asks_for_help, help_text, meant
from shared.model_source import DEFAULT_MODEL
from shared.setting_lists import api_keys, origins

ENV_PREFIX: Final = "SPLITFLAP_"
CONFIG_VARIABLE: Final = ENV_PREFIX + "CONFIG"
API_KEY_VARIABLE: Final = ENV_PREFIX + "API_KEY"

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GiB: Final = 2**30
_SECRET: Final = frozenset(("api_key",))  # told to nobody: not in an error, not in a command line


def runtime_folder() -> Path:
    """Where sockets lie when nobody says otherwise: a folder of this user's own."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "splitflap" if base else Path(f"/tmp/splitflap-{os.getuid()}")


def _endpoint(name: str) -> str:
    return f"ipc://{runtime_folder() / name}"


FLAG_RULES: Final = SettingsConfigDict(
    frozen=True,
    extra="forbid",
    cli_kebab_case=True,
    cli_implicit_flags=True,
    cli_exit_on_error=False,
    cli_hide_none_type=True,
    protected_namespaces=(),
)
"""What flags look like and how strict they are: of every command."""


class CommonSettings(BaseSettings):
    """What every process has."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, **FLAG_RULES)

    config: Path | None = Field(None, description="TOML file with settings")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is worth a line"
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="lines for people, or JSON for machines; always on stderr"
    )
    metrics_host: str = Field("127.0.0.1", description="address of /metrics pages; 0.0.0.0 for all")
    metrics_port: Port | None = Field(
        None, description="serve /metrics here, to all who reach it; default: not at all"
    )
    curve_key_dir: Path | None = Field(
        None,
        description=(
            "this process's CURVE keys and its peers', made by `splitflap keys curve`; with them "
            "the endpoints may be tcp:// beyond loopback; default: no keys"
        ),
    )

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Where to serve /metrics alone, if anywhere."""
        return None if self.metrics_port is None else (self.metrics_host, self.metrics_port)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (put first by pydantic-settings), then the environment, then what `load` read."""
        return env_settings, init_settings


class GatewaySettings(CommonSettings):
    """`splitflap gateway`: text, HTTP, server-sent events."""

    model: str = Field(
        DEFAULT_MODEL,
        description=f"{DEFAULT_MODEL}, toy, a .gguf file, a Hugging Face folder, or a hub id",
    )
    served_model_name: str | None = Field(
        None, description="the name clients use; default: the model's own"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: Port = Field(8000, description="port to listen on")
    request_endpoint: str = Field(
        default_factory=lambda: _endpoint("requests.ipc"),
        description=(
            "where the scheduler listens for gateways (ipc://, or tcp:// on loopback or with keys)"
        ),
    )
    max_body_bytes: Positive = Field(4 * 2**20, description="largest request body")
    request_read_timeout_s: Seconds = Field(
        30.0, description="longest wait for a request's head, and for its body"
    )
    api_key: Annotated[tuple[str, ...], NoDecode, BeforeValidator(api_keys)] = Field(
        (),
        repr=False,
        description=(
            "clients must send one of these as a bearer token, except to /health; repeat it for "
            "several, or give SPLITFLAP_API_KEY them with commas between, where ps shows none"
        ),
    )
    api_key_file: Path | None = Field(
        None,
        description=(
            "more such keys, hashed, with names and limits (`splitflap keys api` makes them); "
            "SIGHUP reads it again"
        ),
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(origins)] = Field(
        (),
        description=(
            "CORS: whose pages may call this server from a browser, like https://example.org, or * "
            "for all; commas between, or repeat it; default: nobody's"
        ),
    )
    stream_interval: Positive = Field(1, description="tokens of a choice between two events")
    ping_interval_s: Seconds = Field(15.0, description="': ping' after so long without an event")
    slow_reader_timeout_s: Seconds = Field(
        60.0, description="a client that takes nothing of its answer for so long is cut off"
    )
    shutdown_timeout: Seconds = Field(30.0, description="seconds for open streams to finish")


class SchedulerSettings(CommonSettings):
    """`splitflap scheduler`: blocks, queues, plans."""

    request_endpoint: str = Field(
        default_factory=lambda: _endpoint("requests.ipc"),
        description="where to listen for gateways (ipc://, or tcp:// on loopback or with keys)",
    )
    step_endpoint: str = Field(
        default_factory=lambda: _endpoint("steps.ipc"),
        description="where to listen for the executor (ipc://, or tcp:// on loopback or with keys)",
    )
    max_num_seqs: Positive = Field(256, description="most sequences that run at once")
    max_num_batched_tokens: Positive = Field(512, description="most tokens one step computes")
    max_num_queued_reqs: Positive = Field(4096, description="most requests that wait; then 429")
    max_num_queued_tokens: Positive = Field(
        4 * 2**20, description="most prompt tokens that wait; then 429"
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="share of blocks kept free at admission")
    preemption_mode: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="what becomes of the blocks of a request that gives way"
    )
    enable_prefix_caching: bool = Field(
        True, description="keep full blocks for prompts that begin alike"
    )
    prefix_caching_hash_algo: Literal["sha256"] = Field(
        "sha256", description="what tells blocks of equal tokens apart from others"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="who is served first: first come, or the lowest `priority`"
    )
    max_pinned_share: float = Field(
        0.5, ge=0, lt=1, description="share of blocks that pinned prefixes may hold"
    )
    enable_kv_bill: bool = Field(
        False, description="tell in `usage` what a request cost in blocks of the KV pool"
    )
    plans_in_flight: Annotated[int, Field(ge=1, le=2)] = Field(
        2, description="steps sent ahead of their results, 1 or 2"
    )
    step_timeout: Seconds = Field(
        60.0,
        description=(
            "seconds without the result of a step after which its executor is given up, or ten "
            "times what the step should take, if that is longer"
        ),
    )
    stream_ttl: Seconds = Field(
        300.0, description="seconds for which a stream without a reader is kept for who comes back"
    )
    max_detached_streams: Positive = Field(4096, description="most streams that are kept so")
    max_detached_bytes: Positive = Field(
        256 * 2**20, description="most memory for these; the oldest that are over go first"
    )


class ExecutorSettings(CommonSettings):
    """`splitflap executor`: the model and its KV pool."""

    model: str = Field(
        DEFAULT_MODEL,
        description=f"{DEFAULT_MODEL}, toy, a .gguf file, a Hugging Face folder, or a hub id",
    )
    step_endpoint: str = Field(
        default_factory=lambda: _endpoint("steps.ipc"),
        description="where the scheduler listens for the executor",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description=(
            "of weights and activations; auto: bfloat16 on a GPU, and where the CPU computes in it"
        ),
    )
    quantization: Literal["int8"] | None = Field(
        None, description="multiply weights and activations as int8; default: in --dtype"
    )
    kv_cache_dtype: Literal["auto", "bf16", "int8", "fp8_e4m3"] = Field(
        "auto", description="of keys and values in the KV pool; auto: the weights' own"
    )
    device: Literal["auto", "cpu", "cuda", "interpreter"] = Field(
        "auto",
        description=(
            "what computes; auto: a GPU if torch sees one, else the CPU; interpreter: a GPU's "
            "kernels in Triton's interpreter, for tests"
        ),
    )
    gpu_memory_utilization: float = Field(
        0.9,  # vLLM's
        gt=0,
        le=1,
        description="share of a GPU's memory for weights, steps and the KV pool together",
    )
    max_model_len: Positive | None = Field(
        None, description="longest sequence, prompt included; default: the model's, if it fits"
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        16,
        description="tokens a block",  # Kwon et al. 2023, section 7.2
    )
    num_gpu_blocks_override: Positive | None = Field(
        None, description="blocks in the KV pool, instead of sizing it by memory"
    )
    kv_cache_memory_bytes: Positive | None = Field(
        None,
        description=(
            "bytes for the KV pool; default: 40 % of what is free, at most 4 GiB; on a GPU all "
            "that --gpu-memory-utilization leaves"
        ),
    )
    swap_space: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="GiB for the blocks of requests that gave way"
    )
    num_cpu_blocks_override: Annotated[int, Field(ge=0)] | None = Field(
        None, description="blocks for requests that gave way, instead of --swap-space"
    )
    threads: Positive | None = Field(None, description="CPU threads; default: all cores")
    toy_step_ms: float = Field(
        0.0, ge=0, le=60_000, description="how long a step of the toy model takes"
    )


class UpSettings(GatewaySettings, SchedulerSettings, ExecutorSettings):
    """`splitflap up`: all three as supervised child processes, with sockets of their own."""

    request_endpoint: str | None = Field(None, description="default: in a folder of this run")  # type: ignore[assignment]
    step_endpoint: str | None = Field(None, description="default: in a folder of this run")  # type: ignore[assignment]
    metrics_port: Port | None = Field(
        None, description="refused here: use the three below", json_schema_extra=HIDDEN
    )
    gateway_metrics_port: Port | None = Field(None, description="the gateway's, without keys")
    scheduler_metrics_port: Port | None = Field(None, description="the scheduler's /metrics")
    executor_metrics_port: Port | None = Field(None, description="the executor's /metrics")

    @field_validator("metrics_port")
    @classmethod
    def _one_each(cls, port: Port | None) -> Port | None:
        if port is not None:
            raise ValueError(
                "use --gateway-metrics-port, --scheduler-metrics-port, --executor-metrics-port"
            )
        return port


Settings = TypeVar("Settings", bound=CommonSettings)
_Flags = TypeVar("_Flags", bound=BaseSettings)


def load(settings_class: type[Settings], arguments: Sequence[str], program: str) -> Settings:
    """Settings from flags, environment and file.

    Raises: StartError naming the setting and what it takes. Exits after --help.
    """
    file = _config_path(arguments)
    known = set(UpSettings.model_fields)
    from_file = _read_toml(file) if file else {}
    _refuse_unknown(from_file, known, f"{file}: ")
    _refuse_unknown(
        {name.removeprefix(ENV_PREFIX).lower(): "" for name in os.environ if _is_ours(name)},
        known,
        f"environment, {ENV_PREFIX}*: ",
    )
    own = {name: value for name, value in from_file.items() if name in settings_class.model_fields}
    return from_flags(settings_class, arguments, program, **own)


def from_flags(
    settings_class: type[_Flags], arguments: Sequence[str], program: str, **given: Any
) -> _Flags:
    """Settings from flags, over what is `given`.

    Raises: StartError naming the setting and what it takes. Exits after --help.
    """
    if asks_for_help(arguments):
        sys.stdout.write(help_text(settings_class, program))
        raise SystemExit(0)
    try:
        return settings_class(
            **given, _cli_parse_args=list(arguments), _cli_prog_name=program
        )  # the underscored names are pydantic-settings' own
    except ValidationError as error:
        raise StartError(_explain(error)) from error
    except SettingsError as error:
        said = meant(settings_class, arguments) or str(error)
        raise StartError(f"{said}; see {program} --help") from error


def flags_of(settings: CommonSettings, settings_class: type[CommonSettings]) -> list[str]:
    """`settings` as the command line of one process: only what was set, and belongs to it.

    Secrets are not for command lines, which anybody may read: `secrets_of` has them.
    """
    flags: list[str] = []
    for name in settings_class.model_fields:
        if name in settings.model_fields_set and name != "config" and name not in _SECRET:
            value = getattr(settings, name)
            if isinstance(value, tuple):
                value = json.dumps(value)
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
            elif value is not None:
                flags.append(f"--{name.replace('_', '-')}={value}")
    return flags


def secrets_of(settings: CommonSettings, settings_class: type[CommonSettings]) -> dict[str, str]:
    """What `flags_of` leaves out, as environment variables."""
    return {
        ENV_PREFIX + name.upper(): json.dumps(list(getattr(settings, name)))
        for name in _SECRET & settings.model_fields_set & set(settings_class.model_fields)
    }


def _is_ours(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and name != CONFIG_VARIABLE


def _config_path(arguments: Sequence[str]) -> Path | None:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(named) if named else None


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"--config {path}: cannot be read as TOML ({error})") from error


def _refuse_unknown(names: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(names) - known)
    if unknown:
        near = get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise StartError(f"{where}no setting is called {', '.join(unknown)}{hint}")


_WORDS: Final = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "missing": "must be given",
}
"""pydantic's kinds of errors that settings can have, in our words."""


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in _WORDS:
            message = _WORDS[problem["type"]].format(**problem.get("ctx", {}))
        if problem["type"] == "literal_error":
            choices = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
            message = f"choose from {choices}"
        if not problem["loc"]:  # of several settings together
            lines.append(message)
            continue
        flag = "--" + str(problem["loc"][0]).replace("_", "-")
        has_value = problem["type"] != "missing" and problem["loc"][0] not in _SECRET
        given = f" {_written(problem['input'])}" if has_value else ""
        lines.append(f"{flag}{given}: {message}")
    return "; ".join(lines)


def _written(given: Any) -> str:
    return " ".join(map(str, given)) if isinstance(given, list | tuple) else repr(given)
