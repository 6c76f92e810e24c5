"""`python -m distrag` and `torchrun -m distrag`: the same command line as `distrag`."""

from distrag.cli import main

if __name__ == "__main__":
    main()
