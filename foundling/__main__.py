"""`foundling`, and `python -m foundling`: a Ctrl-C ends it with a code and a line from the first
moment, while the command line itself is imported."""

import os
import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from foundling.cli.main import main as run

        run()
    except KeyboardInterrupt:
        os.write(2, b"foundling: interrupted\n")
        os._exit(130)  # python would end as if killed by the signal
    finally:
        if sys.argv[1:2] == ["train"]:
            from foundling.runtime.processes import ignore_all

            ignore_all()  # its code is known, and it is python that ends


if __name__ == "__main__":
    main()
