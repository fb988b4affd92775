"""Subcommands of `pageglass`, one module each; `app.cli` puts them together."""
