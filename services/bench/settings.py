"""The flags of `splitflap bench`: vLLM's names where `vllm bench serve` has one.

Nothing is read from the servers' environment or settings file: a bench is often aimed at another
machine. Only OPENAI_API_KEY is, which belongs to clients.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from services.bench.body import Backend
from services.bench.report import METRICS
from services.bench.workloads import WORKLOADS, Workload
from shared.model_source import DEFAULT_MODEL
from shared.settings import FLAG_RULES, Port, Positive, Seconds, from_flags

PROGRAM: Final = "splitflap bench"
DatasetName = Literal["A", "B", "C", "L", "random", "sharegpt", "prefix_repetition", "burstgpt"]
NEED_PATH: Final = ("sharegpt", "burstgpt")
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")

_OTHER_NAMES: Final = {
    "--endpoint-type": "--backend",
    "--workload": "--dataset-name",
    "--concurrency": "--max-concurrency",
}
_LISTS: Final = ("--goodput", "--metadata", "--header")  # `--goodput a:1 b:2`, as argparse's +

Ratio = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class BenchSettings(BaseSettings):
    """`splitflap bench`: load an OpenAI-compatible server, and report as `vllm bench serve`."""

    model_config = FLAG_RULES

    base_url: str | None = Field(None, description="of the server; instead of --host and --port")
    host: str = Field("127.0.0.1", description="where the server listens")
    port: Port = Field(8000, description="its port")
    backend: Backend | None = Field(
        None,
        description="also --endpoint-type; default: openai-chat for A, B, C and L, else openai",
    )
    endpoint: str | None = Field(None, description="path; default: the backend's")
    api_key: SecretStr | None = Field(None, description="default: OPENAI_API_KEY")
    header: tuple[str, ...] = Field((), description="KEY=VALUE, more headers to send")
    model: str | None = Field(None, description="default: the first that the server lists")
    tokenizer: str = Field(DEFAULT_MODEL, description="of the model; what `up --model` takes")

    dataset_name: DatasetName = Field("random", description="also --workload")
    dataset_path: Path | None = Field(
        None, description="ShareGPT's JSON, BurstGPT's CSV, or a text to cut A, B, C and L from"
    )
    num_prompts: Positive | None = Field(
        None, description="default: 1000; for A, B, C and L 3 x concurrency, at least 8"
    )
    seed: int = Field(0, description="of all dice: the same seed, the same requests")
    random_input_len: Positive = Field(1024, description="random: tokens of a prompt")
    random_output_len: Positive = Field(128, description="random: tokens of an answer")
    random_range_ratio: Ratio = Field(
        0.0, description="random: both lengths vary by this share, up and down"
    )
    random_prefix_len: int = Field(0, ge=0, description="random: first tokens that all share")
    prefix_repetition_prefix_len: Positive = Field(
        256, description="prefix_repetition: tokens of a prefix"
    )
    prefix_repetition_suffix_len: Positive = Field(
        256, description="prefix_repetition: tokens behind it"
    )
    prefix_repetition_num_prefixes: Positive = Field(
        10, description="prefix_repetition: different prefixes"
    )
    prefix_repetition_output_len: Positive = Field(
        128, description="prefix_repetition: tokens of an answer"
    )
    sharegpt_output_len: Positive | None = Field(None, description="default: the data's own")

    request_rate: float = Field(float("inf"), gt=0, description="requests a second; inf: at once")
    burstiness: Above0 = Field(1.0, description="shape of the gamma distribution of gaps")
    max_concurrency: Positive | None = Field(None, description="also --concurrency")
    max_seconds: Seconds | None = Field(None, description="send no request later than this")
    num_warmups: int | None = Field(
        None, ge=0, description="requests before the run; default: 2 for A, B, C and L, else 0"
    )
    request_timeout: Seconds = Field(21_600.0, description="seconds for one answer")

    ignore_eos: bool = Field(
        False, description="answers of full length, past the model's end of text"
    )
    temperature: float | None = Field(None, description="default: the workload's, mostly 0")
    top_p: float | None = Field(None, description="sent if given")
    top_k: int | None = Field(None, description="sent if given")
    min_p: float | None = Field(None, description="sent if given")
    frequency_penalty: float | None = Field(None, description="sent if given")
    presence_penalty: float | None = Field(None, description="sent if given")
    repetition_penalty: float | None = Field(None, description="sent if given")
    extra_body: str = Field(
        "{}", description='JSON put into each request; "$MAX" is its max_tokens, null takes out'
    )

    percentile_metrics: str = Field(",".join(METRICS), description="of " + ",".join(METRICS))
    metric_percentiles: str = Field("50,90,99", description="which percentiles to report")
    goodput: tuple[str, ...] = Field(
        (), description="limits in ms, like ttft:200 tpot:50 e2el:5000"
    )
    label: str | None = Field(None, description="of the result; default: the backend")
    metadata: tuple[str, ...] = Field((), description="KEY=VALUE, kept in the result")
    save_result: bool = Field(False, description="write the result as JSON")
    save_detailed: bool = Field(False, description="with every request (implies --save-result)")
    result_dir: Path = Field(Path(), description="where to")
    result_filename: str | None = Field(None, description="default: made of label, rate and time")
    disable_tqdm: bool = Field(False, description="show no progress")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags alone (pydantic-settings puts them first by itself)."""
        return (init_settings,)

    @field_validator("extra_body")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        if not isinstance(json.loads(text), dict):
            raise ValueError("is no JSON object")  # noqa: TRY004 - pydantic wants ValueError
        return text

    @field_validator("percentile_metrics")
    @classmethod
    def _are_metrics(cls, text: str) -> str:
        unknown = set(text.split(",")) - set(METRICS)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: choose from {', '.join(METRICS)}")
        return text

    @field_validator("metric_percentiles")
    @classmethod
    def _are_percentiles(cls, text: str) -> str:
        if not all(0 <= float(percent) <= 100 for percent in text.split(",")):
            raise ValueError("percentiles lie between 0 and 100")
        return text

    @field_validator("goodput")
    @classmethod
    def _are_limits(cls, limits: tuple[str, ...]) -> tuple[str, ...]:
        for limit in limits:
            name, _, milliseconds = limit.partition(":")
            if name not in GOODPUT_METRICS or not _is_a_limit(milliseconds):
                raise ValueError(
                    f"{limit!r}: write {', '.join(GOODPUT_METRICS)}, a colon, ms, like ttft:200"
                )
        return limits

    @field_validator("header", "metadata")
    @classmethod
    def _are_pairs(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            if not pair.partition("=")[0] or "=" not in pair:
                raise ValueError(f"{pair!r}: write KEY=VALUE")
        return pairs

    @model_validator(mode="after")
    def _fit_together(self) -> "BenchSettings":
        if self.dataset_name in NEED_PATH and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {self.base_url}: begins with http:// or https://")
        return self

    @property
    def workload(self) -> Workload | None:
        """The data set, if it is one of ours."""
        return next((name for name in WORKLOADS if name == self.dataset_name), None)

    @property
    def root_url(self) -> str:
        """The server, without a path; a `/v1` at the end is what other clients want there."""
        is_bare_ipv6 = ":" in self.host and not self.host.startswith("[")
        host = f"[{self.host}]" if is_bare_ipv6 else self.host
        url = self.base_url or f"http://{host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def chosen_backend(self) -> Backend:
        """Given, or what suits the data set."""
        return self.backend or ("openai-chat" if self.workload else "openai")

    @property
    def url(self) -> str:
        """Where requests go."""
        is_chat = self.chosen_backend == "openai-chat"
        path = self.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
        return f"{self.root_url}/{path.lstrip('/')}"

    @property
    def count(self) -> int:
        """How many requests."""
        ours = max(3 * (self.max_concurrency or 1), 8)
        return self.num_prompts or (ours if self.workload else 1000)

    @property
    def warmups(self) -> int:
        """How many requests before the run."""
        return self.num_warmups if self.num_warmups is not None else (2 if self.workload else 0)

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        key = self.api_key.get_secret_value() if self.api_key else os.environ.get("OPENAI_API_KEY")
        mine = {"Authorization": f"Bearer {key}"} if key else {}
        return mine | pairs(self.header)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of the body that were given as flags."""
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty",
                 "presence_penalty", "repetition_penalty")  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        ignoring = {"ignore_eos": True} if self.ignore_eos else {}
        return {name: value for name, value in given.items() if value is not None} | ignoring

    @property
    def goodput_s(self) -> dict[str, float]:
        """{metric: limit in seconds}."""
        split = (limit.partition(":") for limit in self.goodput)
        return {name: float(milliseconds) / 1000 for name, _, milliseconds in split}

    @property
    def metrics(self) -> list[str]:
        """What to report percentiles of."""
        return self.percentile_metrics.split(",")

    @property
    def percentiles(self) -> list[float]:
        """Which."""
        return [float(percent) for percent in self.metric_percentiles.split(",")]


def pairs(given: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE strings as a dictionary."""
    return {name: value for name, _, value in (pair.partition("=") for pair in given)}


def _is_a_limit(milliseconds: str) -> bool:
    try:
        return float(milliseconds) >= 0
    except ValueError:
        return False


def load_settings(arguments: Sequence[str]) -> BenchSettings:
    """Settings from flags.

    Raises: StartError naming the flag and what it takes. Exits after --help.
    """
    return from_flags(BenchSettings, _spelled_out(arguments), PROGRAM)


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """Other names replaced, and each flag that takes several values written as one JSON list."""
    flags: list[str] = []
    lists: dict[str, list[str]] = {}
    gathering: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = _OTHER_NAMES.get(name, name)
            gathering = name if name in _LISTS else None
            if gathering is None:
                flags.append(name + equals + value)
            else:
                lists.setdefault(name, []).extend([value] if equals else [])
        elif gathering is not None:
            lists[gathering].append(argument)
        else:
            flags.append(argument)
    return flags + [f"{name}={json.dumps(values)}" for name, values in lists.items()]
