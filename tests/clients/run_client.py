"""Runs public clients against a live `coterie serve`, each from its own environment.

    .venv/bin/python -m tests.clients.run_client openai lm_eval ...    (or: all)
    ... --envs FOLDER    where the environments are made and kept (some take gigabytes)
    ... --install-only   makes the environments and runs nothing
    ... --record         also writes what they sent to tests/clients/recorded/

What is served is the demo model with a chat template that takes tools (its own takes none).
Clients are told to download nothing: their tokenizer is the demo model's own. Exits 1 where a
client fails or where the server answered it with a 4xx or 5xx that it did not provoke on purpose.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.live_service import live_service
from tests.clients.clients import CLIENTS, HERE, HUB_ID, MODEL, Client, Place
from tests.clients.recording_proxy import RecordingProxy

ROOT = HERE.parents[1]
CLIENT_LIMIT_S = 900
ENVIRONMENTS = Path(tempfile.gettempdir()) / "coterie-clients"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
PROVOKED = ("no-such-model", "/tokenizer_info", "GET /metrics", "GET / ")
"""Marks of requests that probe for what may be missing, or ask for the wrong on purpose."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*CLIENTS, "all"])
    parser.add_argument("--envs", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--port", type=int, default=0, help="of the server; 0: a free one")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    names = list(CLIENTS) if "all" in options.names else options.names
    for name in names:
        install(CLIENTS[name], options.envs.resolve())
    if options.install_only:
        return
    failed = []
    with (
        tempfile.TemporaryDirectory() as folder,
        live_service(model_with_tools(Path(folder)), options.port, "engine.threads=1") as port,
    ):
        for name in names:
            if not run(CLIENTS[name], options.envs.resolve(), port, options.record):
                failed.append(name)
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed {' '.join(failed)}".rstrip())
    sys.exit(1 if failed else 0)


def install(client: Client, envs: Path) -> None:
    """Makes the client's environment unless it is there."""
    folder = envs / client.name
    if (folder / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for arguments in client.install:
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments], check=True
        )
    (folder / ".installed").touch()


def model_with_tools(scratch: Path) -> Path:
    """The demo model's files under its own name, with our template for its chats."""
    folder = scratch / MODEL
    folder.mkdir()
    for file in (ROOT / MODEL).iterdir():
        if file.suffix != ".jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").symlink_to(HERE / "tools_template.jinja")
    return folder


def make_hub_cache(home: Path) -> None:
    """A hub cache below `home` that holds the demo model's files as HUB_ID."""
    revision = "0" * 40
    repository = home / "hub" / ("models--" + HUB_ID.replace("/", "--"))
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    for file in (ROOT / MODEL).iterdir():
        (repository / "snapshots" / revision / file.name).symlink_to(file)


def run(client: Client, envs: Path, port: int, record: bool) -> bool:
    """Runs all commands of one client through a recording proxy; whether all went well."""
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with RecordingProxy(port) as proxy, tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch)
        make_hub_cache(results)
        place = Place(envs / client.name / "bin", proxy.url, ROOT / MODEL, results)
        good = True
        for command in client.commands(place):
            output = results / "output"
            with output.open("wb") as sink:
                code = subprocess.run(
                    command,
                    cwd=HERE / "lm_eval_tasks",
                    env={**environ, **OFFLINE, "HF_HOME": scratch},
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=CLIENT_LIMIT_S,
                    check=False,
                ).returncode
            text = output.read_text(errors="replace")
            print(f"--- {client.name}: {' '.join(command[:3])} ... ended with {code}", flush=True)
            print("\n".join(text.splitlines()[-40:]), flush=True)
            good = good and code == 0
        refused = [x for x in proxy.refusals if not any(mark in x for mark in PROVOKED)]
        for (route, status), count in sorted(proxy.statuses.items()):
            print(f"{client.name}: {count} x {route}: {status}")
        for line in refused[:10]:
            print(f"{client.name}: refused: {line}")
        if record:
            write_record(client, envs, proxy)
    return good and not refused


def write_record(client: Client, envs: Path, proxy: RecordingProxy) -> None:
    """Keeps what the client sent, for tests that run without it."""
    program = f"from importlib import metadata; print(metadata.version('{client.distribution}'))"
    python = envs / client.name / "bin" / "python"
    version = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    kept = [x for x in proxy.requests if x["method"] == "POST"]
    record = {"client": f"{client.distribution} {version}", "requests": kept}
    path = HERE / "recorded" / f"{client.name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{client.name}: {len(kept)} bodies in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
