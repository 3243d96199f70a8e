"""The public clients that are run against a live server: what to install, and their commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "demo_model"
HUB_ID = "local/demo_model"
"""The name under which a client that takes no folder finds the tokenizer in its own hub cache."""

_VLLM_IMPORTS = (
    "torch transformers aiohttp tqdm numpy regex pydantic requests huggingface_hub uvloop "
    "cloudpickle msgspec psutil pyzmq pillow cachetools blake3 fastapi openai prometheus_client "
    "einops setuptools packaging pyyaml gguf sentencepiece filelock six protobuf cbor2 "
    "openai-harmony pybase64 py-cpuinfo partial-json-parser uvicorn xgrammar llguidance "
    "watchfiles orjson"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command runs: the client's own Python, our server, and the model's folder."""

    bin: Path
    url: str
    model_dir: Path
    results: Path


@dataclass(frozen=True, slots=True)
class Client:
    """`install` are lists of arguments of pip; `commands` are run one after the other."""

    name: str
    distribution: str
    install: tuple[tuple[str, ...], ...]
    commands: Callable[[Place], list[list[str]]]


def _program(file: str) -> Callable[[Place], list[list[str]]]:
    def commands(place: Place) -> list[list[str]]:
        program = HERE / "programs" / file
        return [[str(place.bin / "python"), str(program), f"{place.url}/v1", MODEL]]

    return commands


def _lm_eval(place: Place) -> list[list[str]]:
    def run(model: str, tasks: str, route: str, *more: str) -> list[str]:
        args = (
            f"model={MODEL},base_url={place.url}/v1/{route},tokenizer={place.model_dir},"
            "num_concurrent=2,max_retries=1"
        )
        shared = ["--include_path", str(HERE / "lm_eval_tasks"), "--tasks", tasks]
        start = [str(place.bin / "lm_eval"), "run", "--model", model, "--model_args", args]
        return [*start, *shared, *more]

    texts = "animals,stories,perplexity"
    return [
        run("local-completions", texts, "completions", "--batch_size", "2"),
        run("local-chat-completions", "stories", "chat/completions", "--apply_chat_template"),
    ]


def _guidellm(place: Place) -> list[list[str]]:
    def run(route: str, profile: str) -> list[str]:
        backend = f"kind=openai_http,target={place.url},model={MODEL},request_format={route}"
        return [
            *[str(place.bin / "guidellm"), "run", "--disable-console-interactive"],
            *["--backend", backend, "--profile", profile],
            *["--constraint", "kind=max_requests,count=8"],
            *["--tokenizer", f"kind=hf_auto,model={place.model_dir}"],
            *["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=8"],
            *["--output", f"kind=json,path={place.results / 'guidellm.json'}"],
        ]

    return [
        run("/v1/chat/completions", "kind=concurrent,streams=2"),
        run("/v1/completions", "kind=poisson,rate=4"),
    ]


def _aiperf(place: Place) -> list[list[str]]:
    def run(endpoint: str, *more: str) -> list[str]:
        return [
            *[str(place.bin / "aiperf"), "profile", "--model", MODEL, "--url", place.url],
            *["--endpoint-type", endpoint, "--tokenizer", HUB_ID],
            *["--isl", "48", "--osl", "8", "--request-count", "8", "--ui-type", "none"],
            *["--output-artifact-dir", str(place.results / endpoint), *more],
        ]

    return [
        run("chat", "--streaming", "--concurrency", "2"),
        run("chat", "--concurrency", "2", "--use-server-token-count"),
        run("completions", "--streaming", "--request-rate", "4"),
    ]


def _vllm_bench(place: Place) -> list[list[str]]:
    def run(backend: str, route: str, *more: str) -> list[str]:
        return [
            *[str(place.bin / "vllm"), "bench", "serve", "--backend", backend],
            *["--base-url", place.url, "--endpoint", route, "--model", MODEL],
            *["--tokenizer", str(place.model_dir), "--dataset-name", "random"],
            *["--random-input-len", "48", "--random-output-len", "8", "--num-prompts", "8"],
            *["--disable-tqdm", *more],
        ]

    return [
        run("openai", "/v1/completions", "--ignore-eos"),
        run("openai-chat", "/v1/chat/completions", "--request-rate", "4"),
    ]


CLIENTS = {
    client.name: client
    for client in (
        Client("openai", "openai", (("openai",),), _program("openai_client.py")),
        Client("litellm", "litellm", (("litellm",),), _program("litellm_client.py")),
        Client("lm_eval", "lm_eval", (("lm_eval[api]", "transformers"),), _lm_eval),
        Client("guidellm", "guidellm", (("guidellm",),), _guidellm),
        Client("aiperf", "aiperf", (("aiperf",),), _aiperf),
        # All that vLLM itself asks for is gigabytes of CUDA; its load generator imports this much.
        Client(
            "vllm",
            "vllm",
            (("--no-deps", "vllm"), tuple(_VLLM_IMPORTS.split())),
            _vllm_bench,
        ),
    )
}
