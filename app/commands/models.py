"""`pageglass models`: fetch the default model, list the models on this machine."""

import click

from app import model_store
from app.commands.progress import ProgressLine
from app.model_store import DEFAULT_MODEL, FetchProgress

_MEGABYTE = 1_000_000


@click.group()
def models() -> None:
    """Fetch and list models."""


@models.command()
@click.argument("name", default=DEFAULT_MODEL)
def fetch(name: str) -> None:
    """Bring a model to this machine and check it; does nothing when it is there already.

    Without NAME this is the small default model.
    """
    line = ProgressLine()
    fetched = False

    def show(progress: FetchProgress) -> None:
        nonlocal fetched
        if progress.stage == "checking":
            return
        fetched = True
        line.update(f"{name}: {progress.stage} {progress.fraction:.0%}")

    try:
        path = model_store.fetch(name, show)
    finally:
        line.close()
    click.echo(f"{name}: {'fetched' if fetched else 'present'}, {path}")


@models.command("list")
def list_() -> None:
    """Show name, size and path of each model; the default one is marked."""
    stored = model_store.list_models()
    if not stored:
        click.echo(f"No models in {model_store.models_dir()}. Get the default one: pageglass models fetch")
        return
    width = max(len(model.name) for model in stored)
    for model in stored:
        mark = "  (default)" if model.is_default else ""
        click.echo(f"{model.name:{width}}  {model.size_bytes / _MEGABYTE:8.1f} MB  {model.path}{mark}")
