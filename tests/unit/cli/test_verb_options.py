"""Options and their help: arguments that are left out, a family's help, and labels of bars."""

import io

import pytest
from rich.console import Console

from foundling.cli import options
from foundling.cli.main import VERBS, run_verb
from foundling.cli.parser import parse
from foundling.config.load import _first_clause, settings_help
from foundling.runtime import console

OPTIONAL = [
    name
    for name, verb in VERBS.items()
    if any(option.is_argument and not option.is_mandatory for option in verb.options)
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_argument_that_is_left_out_has_its_default(name: str) -> None:
    verb = VERBS[name]
    needed = [option for option in verb.options if option.is_mandatory]
    words = [word for o in needed for word in ([] if o.is_argument else [o.name.split()[0]])]
    words += ["x" for _ in needed]
    found = parse(verb, name, words)
    for option in verb.options:
        if option.is_argument and not option.is_mandatory:
            assert getattr(found, option.key) == option.default_value
            assert option.key not in found.given


def test_the_help_of_a_family_has_one_empty_line_between_its_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run_verb(["data", "--help"])
    said = capsys.readouterr().out
    assert "data inspect" in said
    assert "\n\n\n" not in said


def test_the_short_help_says_what_zero_and_empty_mean() -> None:
    text = " ".join(settings_help("foundling train").split())
    assert "all processes; 0 means one micro-step of each process (default: 0)" in text
    assert "0 takes the tokenizer's size when training starts (default: 0)" in text
    first = _first_clause("A folder. Of files; empty: the data's own; 3: none.", "")
    assert first == "A folder; empty: the data's own"
    assert "0 switches them off" not in text, "eval.every is 200 by default"


def test_a_bar_of_bytes_says_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    screen = Console(file=page, force_terminal=True, width=100)
    monkeypatch.setattr(console, "console", lambda stderr=False: screen)
    with options.bytes_bar(100, "hashing [a]") as advance:
        advance(50)
    assert "hashing [a]" in page.getvalue()
