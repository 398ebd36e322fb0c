"""Places where a test may stop the world: `at("rename")` does nothing, and a test replaces it.

A kill at a chosen instant cannot be arranged from outside, and a switch in what ships (an
environment variable, a setting) could be thrown by accident. So the code only says where it is, and
tests/chaos puts its own function here (`points.at = ...`), in child processes too. Callers write
`points.at(...)` and never import the function by itself.

    stage     a tensor is about to be copied to the host
    write     bytes are about to go to a file
    fsync     a file or folder is about to be forced to the disk
    rename    a finished folder is about to get its name
    delete    a checkpoint is about to lose its name, its marker, its files (three times)
    evaluate  an evaluation is about to begin
"""


def at(point: str) -> None:
    """Nothing, unless a test put something here."""
