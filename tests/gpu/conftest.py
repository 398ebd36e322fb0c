"""Before any test: cuBLAS looks once in a process whether its results are to be repeatable, at its
first product, and a later test that wants that would be refused."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
