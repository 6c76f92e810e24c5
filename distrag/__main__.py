"""`python -m distrag` and `torchrun -m distrag`: the same command line as `distrag`."""

from distrag.cli import run

if __name__ == "__main__":
    run()
