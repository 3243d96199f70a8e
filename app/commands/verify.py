"""`coterie verify`: reads a whole checkpoint before anything is served from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.plain_console import plain_console
from core.config_model import format_bytes
from expert_pool.model_location import locate

if TYPE_CHECKING:
    from engine.parity import LayerParity
    from expert_pool.checkpoint_index import CheckpointIndex
    from expert_pool.verify import VerifyReport

_EXIT_FAILURE = 1


def verify(
    model: Annotated[str, typer.Argument(help="Model folder, or hub id in the local cache.")],
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a hub id that is not in the cache.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity", help="Also compare each layer with stock transformers, on your weights."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Account for every tensor of MODEL, read every byte, and learn or compare checksums.

    Exits 1 where bytes differ from their checksum.

    \b
      coterie verify ./demo_model
      coterie verify ORG/NAME --download --json
    """
    from expert_pool.checkpoint_index import CheckpointIndex

    index = CheckpointIndex.open(locate(model, download=download))
    report = _read_all(index)
    if not as_json:
        _print(index, report)
    layers = _compare(index, show=not as_json) if parity else []
    if as_json:
        found = {"model": str(index.model_dir), **asdict(report)}
        if parity:
            found["parity"] = [{**asdict(x), "passed": x.passed} for x in layers]
        print(json.dumps(found, default=str))
    if report.mismatched or not all(layer.passed for layer in layers):
        raise typer.Exit(_EXIT_FAILURE)


def _compare(index: CheckpointIndex, show: bool) -> list[LayerParity]:
    from engine.parity import check_parity

    console = plain_console()
    layers: list[LayerParity] = []

    def note(layer: LayerParity) -> None:
        layers.append(layer)
        if show:
            console.print(
                f"layer {layer.decoder_layer:3} {layer.dtype:8}: max |delta| {layer.max_delta:.3g} "
                f"of {layer.output_range:.3g}, {layer.unequal_experts} of {layer.num_experts} "
                f"experts differ, {layer.experts_used} used",
                style="green" if layer.passed else "red",
            )

    check_parity(index, note)
    return layers


def _read_all(index: CheckpointIndex) -> VerifyReport:
    from expert_pool.verify import total_bytes, verify_all

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total_bytes(index))
        return verify_all(index, lambda nbytes: progress.advance(task, nbytes))


def _print(index: CheckpointIndex, report: VerifyReport) -> None:
    shape = index.shape
    console = plain_console()
    console.print(
        f"{shape.model_type}: {len(shape.moe_layers)} MoE layers, {report.experts} experts, "
        f"{report.tensors} backbone tensors in {len(index.files)} files"
    )
    console.print(f"read {format_bytes(report.bytes_read)} in {report.seconds:.1f} s")
    kept = f"kept in {report.checksums_path}" if report.checksums_path else "not kept"
    console.print(f"checksums: {report.learned} learned, {kept}", soft_wrap=True)
    if report.earlier_books:
        console.print(
            f"note: {len(report.earlier_books)} older books of checksums lie here: the weights "
            "were replaced since, or the backbone is damaged"
        )
    for what in report.mismatched:
        console.print(f"DIFFERS FROM ITS CHECKSUM: {what}", style="red")
    if report.mismatched:
        console.print(
            "Fetch these files again. If they were replaced on purpose, delete "
            f"{report.checksums_path} and verify once more."
        )
    else:
        console.print("all bytes are as they should be", style="green")
