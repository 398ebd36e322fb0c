"""A chat template from elsewhere ends within its time and size, or is refused in a sentence."""

import time
from pathlib import Path
from shutil import copytree

import pytest

from foundling.config.errors import DataError
from foundling.tokenizer import chat_template
from foundling.tokenizer.chat_template import ForeignTokenizer
from tests.village import Village

HELLO = [{"role": "user", "content": "Hello"}]
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "repeats": "{{ 'a' * 1000000000 }}",
    "repeats a list": "{{ [0] * 1000000000 }}",
    "powers": "{{ 9 ** 9 ** 9 }}",
    "pads": "{{ '%1000000000d' % 1 }}",
    "doubles": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set n.x = n.x * 2 %}{% endfor %}{{ n.x }}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def opened(village: Village, folder: Path, template: str) -> ForeignTokenizer:
    copytree(village.tokenizer, folder)
    (folder / "chat_template.jinja").write_text(template)
    found = ForeignTokenizer.open(folder)
    assert isinstance(found, ForeignTokenizer)
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(
    village: Village, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)
    tokenizer = opened(village, tmp_path / "t", HOSTILE[name])
    began = time.monotonic()
    with pytest.raises(DataError, match="chat template refuses this conversation"):
        tokenizer.prompt(HELLO)
    assert time.monotonic() - began < 10


def test_what_templates_do_is_still_done(village: Village, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content ~ '=' * 3 ~ 2 ** 3 ~ '%s' % 5 ~ 7 % 4 }}{% endfor %}"
    )
    tokenizer = opened(village, tmp_path / "t", template)
    assert tokenizer.decode(tokenizer.prompt(HELLO)) == "Hello===853"
