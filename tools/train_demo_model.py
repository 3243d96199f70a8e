"""Train the small Qwen3-MoE demo model on a folder of domain texts.

The learning rate is level after a short warm-up and falls to zero over the last part of the
run. A run is planned by steps or by minutes; one that was stopped goes on from its last
checkpoint, and starting it again with fewer minutes brings the fall forward.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from tools.demo_batches import Batches, heldout_rows
from tools.demo_corpus import Record, read_corpus, split
from tools.demo_export import build_config, build_model, export
from tools.demo_forward import losses
from tools.demo_tokenizer import train_tokenizer
from tools.muon import Muon

WARMUP = 40
"""Steps over which the learning rate rises."""


@dataclass
class Plan:
    """Everything that fixes a run. Lengths in tokens, times in minutes."""

    steps: int
    minutes: float
    rows: int
    context: int
    final_context: int
    cooldown: float
    final_share: float
    seed: int
    balance: float
    domain: float
    muon_lr: float
    adam_lr: float
    small: bool
    factors: dict[str, float]

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is done, 0 to 1."""
        by_step = step / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_step, by_time))

    def scale(self, step: int, done: float) -> float:
        """Learning rate as a share of its peak."""
        return min(1.0, (step + 1) / WARMUP, (1.0 - done) / self.cooldown)


class Run:
    """Model, optimisers and data of one training run."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, domains: dict[str, list[Record]]) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.model: Qwen3MoeForCausalLM = build_model(
            build_config(tokenizer, plan.small), plan.seed
        )
        parts = {name: split(records) for name, records in domains.items()}
        self.batches = Batches(
            {k: train for k, (train, _) in parts.items()},
            tokenizer,
            plan.seed,
            factors=plan.factors,
        )
        self.heldout = heldout_rows(
            {k: held for k, (_, held) in parts.items()}, tokenizer, plan.context, plan.rows // 2
        )
        named = list(self.model.named_parameters())
        inner = [p for n, p in named if "_proj" in n]
        halves = [p for n, p in named if n.endswith("gate_up_proj")]
        self.muon = Muon(inner, lr=plan.muon_lr, halves=halves)
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named if "embed" in n], "lr": 2 * plan.adam_lr},
            {"params": [p for n, p in named if "_proj" not in n and "embed" not in n]},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=plan.adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )
        self.peaks = [(g, g["lr"]) for o in (self.muon, self.adam) for g in o.param_groups]
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.log: list[dict[str, Any]] = []

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns its figures."""
        done = self.plan.progress(self.step, self.seconds)
        scale = self.plan.scale(self.step, done)
        for group, peak in self.peaks:
            group["lr"] = peak * scale
        length = self.plan.context
        if done > 1.0 - self.plan.final_share:
            length = self.plan.final_context
        rows = max(1, self.plan.rows * self.plan.context // length)
        ids, target, kind = self.batches.next(rows, length)
        got = losses(self.model, ids, target, kind)
        total = got.token + self.plan.balance * got.balance + self.plan.domain * got.domain
        total.backward()  # type: ignore[no-untyped-call]
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()
        self.step += 1
        self.tokens += ids.numel()
        return {
            "loss": float(got.token.detach()),
            "balance": float(got.balance.detach()),
            "mutual_information": -float(got.domain.detach()),
            "scale": scale,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out perplexity a token by domain, top-8 overlap and unused experts."""
        perplexity: dict[str, float] = {}
        loads: list[Tensor] = []
        for name, (ids, target) in self.heldout.items():
            got = losses(self.model, ids, target, torch.zeros(len(ids), dtype=torch.long))
            perplexity[name] = round(math.exp(float(got.token)), 2)
            loads.append(got.load)
        return {"perplexity": perplexity, "overlap": overlap(loads), "dead": dead(loads)}

    def begin_with(self, folder: Path) -> None:
        """Take the weights of an exported model of the same architecture."""
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(model.state_dict())

    def save(self, path: Path) -> None:
        """Write a checkpoint; the file is complete or absent."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "batches": self.batches.state(),
            "counts": (self.step, self.tokens, self.seconds),
            "log": self.log,
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; learning rates come from the plan."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.batches.restore(state["batches"])
        self.step, self.tokens, self.seconds = state["counts"]
        self.log = state["log"]
        groups = [*self.muon.param_groups, *self.adam.param_groups]
        self.peaks = [(g, peak) for g, (_, peak) in zip(groups, self.peaks, strict=True)]


def overlap(loads: list[Tensor], top: int = 8) -> float:
    """Mean share of common experts among two domains' ``top`` most used, over layers."""
    if len(loads) < 2:
        return 1.0
    tops = [load.topk(min(top, load.shape[1]), dim=1).indices for load in loads]
    shared = [
        len(set(a.tolist()) & set(b.tolist())) / len(a)
        for one, two in itertools.combinations(tops, 2)
        for a, b in zip(one, two, strict=True)
    ]
    return round(sum(shared) / len(shared), 4)


def dead(loads: list[Tensor]) -> int:
    """Experts that no held-out token of any domain chose, over all layers."""
    return int((torch.stack(loads).sum(0) == 0).sum()) if loads else 0


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with one sub-folder per domain.")],
    out: Annotated[Path, typer.Option(help="Where the model is exported.")],
    work: Annotated[Path | None, typer.Option(help="Checkpoints; default: OUT.work")] = None,
    steps: Annotated[int, typer.Option(help="Stop after so many steps (0: no limit).")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes (0: none).")] = 110.0,
    rows: Annotated[int, typer.Option(help="Rows of a batch.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    final_context: Annotated[int, typer.Option(help="Tokens of a row at the end.")] = 512,
    final_share: Annotated[float, typer.Option(help="Share of the run that is the end.")] = 0.2,
    cooldown: Annotated[float, typer.Option(help="Share of the run that cools down.")] = 0.5,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer.")] = 4096,
    balance: Annotated[float, typer.Option(help="Weight of the balance loss.")] = 0.005,
    domain: Annotated[float, typer.Option(help="Weight of the domain loss.")] = 0.01,
    muon_lr: Annotated[float, typer.Option(help="Peak learning rate of the matrices.")] = 0.02,
    adam_lr: Annotated[float, typer.Option(help="Peak learning rate of the rest.")] = 0.003,
    share: Annotated[
        list[str] | None, typer.Option(help="DOMAIN=FACTOR: show a domain more or less often.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    test_every: Annotated[int, typer.Option(help="Steps between held-out tests.")] = 200,
    export_minutes: Annotated[float, typer.Option(help="Minutes between exports.")] = 40.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    start_from: Annotated[
        Path | None,
        typer.Option(help="An exported model whose weights and tokenizer a new run begins with."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    small: Annotated[bool, typer.Option(hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final figures.")] = False,
) -> None:
    """Train the demo model and export it; goes on from a checkpoint in WORK if there is one.

    Example: train_demo_model.py domains --out demo_model --minutes 110
    """
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    work = work or out.with_name(out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    domains = read_corpus(folder)
    if not domains:
        raise typer.BadParameter(f"{folder} has no sub-folder with .jsonl files")
    vocab_file, checkpoint = work / "tokenizer.json", work / "checkpoint.pt"
    if vocab_file.exists():
        tokenizer = Tokenizer.from_file(str(vocab_file))
    elif start_from is not None:
        tokenizer = Tokenizer.from_file(str(start_from / "tokenizer.json"))
        tokenizer.save(str(vocab_file))
    else:
        train_only = {name: split(records)[0] for name, records in domains.items()}
        tokenizer = train_tokenizer(train_only, vocabulary, seed)
        tokenizer.save(str(vocab_file))
    plan = Plan(
        steps, minutes, rows, context, final_context, cooldown, final_share, seed,
        balance, domain, muon_lr, adam_lr, small,
        {name: float(factor) for name, _, factor in (s.partition("=") for s in share or [])},
    )  # fmt: skip
    run = Run(plan, tokenizer, domains)
    if checkpoint.exists():
        run.load(checkpoint)
        console.print(f"going on from step {run.step}")
    elif start_from is not None:
        run.begin_with(start_from)
    else:
        export(run.model, tokenizer, out)
    bar = Progress(
        TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("{task.percentage:.1f} %"),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:.0f} tokens/s"),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=1.0, step=run.step, loss=0.0, speed=0.0)
        exported = run.seconds
        while plan.progress(run.step, run.seconds) < 1.0:
            began = time.monotonic()
            figures = run.train_step()
            if run.step % test_every == 0:
                run.log.append({"step": run.step, "tokens": run.tokens, **run.evaluate()})
                console.print_json(json.dumps({**run.log[-1], **figures}), indent=None)
            taken = time.monotonic() - began
            run.seconds += taken
            if bar.disable and run.step % 20 == 0:
                console.log(f"{run.step} {figures} {rows * context / taken:.0f} tokens/s")
            bar.update(
                task, completed=plan.progress(run.step, run.seconds), step=run.step,
                loss=figures["loss"], speed=rows * context / taken,
            )  # fmt: skip
            if run.step % save_every == 0:
                run.save(checkpoint)
            if run.seconds - exported > 60 * export_minutes:
                exported = run.seconds
                export(run.model, tokenizer, out)
    run.save(checkpoint)
    size = export(run.model, tokenizer, out)
    result = {
        "steps": run.step, "tokens": run.tokens, "minutes": round(run.seconds / 60, 1),
        "bytes": size, **run.evaluate(),
    }  # fmt: skip
    console.print(f"exported {size / 1e6:.1f} MB to {out}")
    if as_json:
        print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
