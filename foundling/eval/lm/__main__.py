"""`python -m foundling.eval.lm ...` is `lm_eval ...` with foundling among its models."""

import sys

from foundling.config.errors import ConfigError, UserError


def main() -> None:
    """The harness's own command line; a user's mistake ends as one sentence."""
    try:
        _require_harness()
        from lm_eval.__main__ import cli_evaluate

        import foundling.eval.lm.harness  # noqa: F401  registers the model

        cli_evaluate()
    except UserError as error:
        print(f"foundling: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _require_harness() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ConfigError(MISSING)


MISSING = "lm-evaluation-harness is not installed; pip install 'foundling[lm-eval]'."


if __name__ == "__main__":
    main()
