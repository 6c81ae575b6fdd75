"""`python -m isthmus`, the form that torchrun starts."""

from isthmus.cli.main import main

if __name__ == "__main__":
    main()
