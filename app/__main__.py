"""`python -m app` is the same as `pageglass`."""

from app.cli import main

if __name__ == "__main__":
    main(prog_name="pageglass")
